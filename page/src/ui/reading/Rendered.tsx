/** Texts as Markdown. The view loads with the first text that needs it. */
import { hasMarkdown } from '../../model/markdown'
import type { OpenLoom } from '../../state/loom'
import { showsSpecial } from '../../state/reading'
import { heatMode, showsMarkdown } from '../../state/view'
import { lazy } from '../lazy'

const useMarkdown = lazy(async () => (await import('../markdown/MarkdownView')).MarkdownView)

/** Return true if the texts of a loom are shown as Markdown. Colours and special tokens need the exact text. */
export const isMarkdownShown = (loom: OpenLoom): boolean =>
  !showsSpecial.value && heatMode.value === 'off' && showsMarkdown(loom.isChat)

interface RenderedProps {
  loom: OpenLoom
  nodes: readonly number[]
  textOf: (number: number) => string
}

/** The nodes of a turn as one Markdown text. */
export function Rendered({ loom, nodes, textOf }: RenderedProps) {
  const View = useMarkdown()
  const text = latestText(loom, nodes, textOf)
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

/** Return true if a branch below the current node is shown as Markdown. */
export const isBranchRendered = (loom: OpenLoom, text: string): boolean =>
  isMarkdownShown(loom) && hasMarkdown(text)

/** A branch below the current node. It has no controls: a click goes to the branch. */
export function RenderedBranch({ text }: { text: string }) {
  const View = useMarkdown()
  return <div data-markdown="shown">{View ? <View text={text} isPreview /> : text}</div>
}

/** The text of nodes up to the last token of those that grow. */
export const latestText = (
  loom: OpenLoom,
  nodes: readonly number[],
  textOf: (number: number) => string,
): string => nodes.map((each) => growing(loom, each) ?? textOf(each)).join('')

function growing(loom: OpenLoom, number: number): string | null {
  const lane = loom.lanes.value.get(number)
  if (lane === undefined || lane.isOver) return null
  lane.version.value
  return lane.text
}
