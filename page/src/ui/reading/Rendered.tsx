/** The nodes of a turn as one Markdown text. The view loads with the first text that needs it. */
import { signal } from '@preact/signals'
import type { FunctionComponent } from 'preact'
import { useEffect } from 'preact/hooks'
import type { OpenLoom } from '../../state/loom'
import { failed } from '../../state/toasts'

const view = signal<FunctionComponent<{ text: string }> | null>(null)
let _loading: Promise<unknown> | null = null

interface RenderedProps {
  loom: OpenLoom
  nodes: readonly number[]
  textOf: (number: number) => string
}

export function Rendered({ loom, nodes, textOf }: RenderedProps) {
  useEffect(() => {
    _loading ??= import('../markdown/MarkdownView').then((loaded) => {
      view.value = loaded.MarkdownView
    }, failed)
  }, [])
  const text = nodes.map((each) => growing(loom, each) ?? textOf(each)).join('')
  const View = view.value
  const last = nodes[nodes.length - 1]!
  return (
    <>
      {nodes.slice(0, -1).map((each) => (
        <span key={each} data-node={each} />
      ))}
      <div data-node={last} data-markdown="shown">
        {View ? <View text={text} /> : text}
      </div>
    </>
  )
}

/** The text of a branch while it grows. */
function growing(loom: OpenLoom, number: number): string | null {
  const lane = loom.lanes.value.get(number)
  if (lane === undefined || lane.isOver) return null
  lane.version.value
  return lane.text
}
