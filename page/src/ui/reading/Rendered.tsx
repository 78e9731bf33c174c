/** The nodes of a turn as one Markdown text. The view loads with the first text that needs it. */
import type { OpenLoom } from '../../state/loom'
import { lazy } from '../lazy'

const useMarkdown = lazy(async () => (await import('../markdown/MarkdownView')).MarkdownView)

interface RenderedProps {
  loom: OpenLoom
  nodes: readonly number[]
  textOf: (number: number) => string
}

export function Rendered({ loom, nodes, textOf }: RenderedProps) {
  const View = useMarkdown()
  const text = nodes.map((each) => growing(loom, each) ?? textOf(each)).join('')
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
