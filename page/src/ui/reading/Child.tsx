/** A child of the current node, as a row: what it says, and how it ended. */
import { Bookmark } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { emptyLabel, meanP } from '../../model/label'
import { isHuman } from '../../model/tree'
import { shownText } from '../../model/turns'
import {
  averageProbability,
  beginning,
  finishWord,
  plural,
  shortName,
  showWhitespace,
} from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import { showsSpecial } from '../../state/reading'
import { sentence } from '../../state/toasts'
import { joined } from './Lane'
import { isBranchRendered, RenderedBranch } from './Rendered'

interface ChildProps {
  loom: OpenLoom
  /** Nodes with this very text; the first is shown. */
  nodes: number[]
  k: number
}

const MAX_CHARS = 1200 // characters that are drawn of it

export function Child({ loom, nodes, k }: ChildProps) {
  const [isOpen, setOpen] = useState(false)
  const number = nodes[0]!
  const node = loom.tree.get(number)
  if (!node) return null
  const text = shownText(node, loom.info.value, showsSpecial.value)
  const words = text
    .slice(0, MAX_CHARS)
    .replace(/^[^\S\n]+/, '')
    .trimEnd()
  const isRendered = node.said == null && isBranchRendered(loom, words)
  const below = loom.tree.below(number)
  const isSuggested = loom.searched.value.has(number)
  const isWritten = isHuman(node) && !isSuggested
  return (
    <>
      <li class="child">
        <button
          type="button"
          class="child-in"
          data-child={number}
          title={k < 10 ? `Go to this branch  ${k}` : 'Go to this branch'}
          onClick={() => loom.navigate(number)}
        >
          <span class="k">{k}</span>
          <span class={`child-text ${isWritten ? 'written' : ''} ${isRendered ? 'rendered' : ''}`}>
            {isRendered ? (
              <RenderedBranch text={words} />
            ) : (
              words || (
                <span class="muted">
                  {text ? showWhitespace(beginning(text, 24)) : emptyLabel(node.ended)}
                </span>
              )
            )}
          </span>
          <span class="caption">
            {node.bookmark != null && (
              <>
                <Bookmark size={12} aria-label="Bookmarked" />
                <bdi class="label cut">{node.bookmark}</bdi>
              </>
            )}
            {joined(
              node.model && shortName(node.model),
              meanP(node) !== null && averageProbability(meanP(node)!),
              plural(node.n_tokens, 'token'),
              isWritten
                ? 'written'
                : isHuman(node)
                  ? 'suggested'
                  : finishWord(node.finish_reason, node.stop_string ?? null),
              node.rating != null && `rated ${node.rating}`,
              node.error && sentence(node.error),
              below > 0 && `${plural(below, 'node')} below`,
            )}
          </span>
        </button>
        {nodes.length > 1 && (
          <button
            type="button"
            class="times caption"
            aria-expanded={isOpen}
            title={isOpen ? 'Show equal branches as one' : `${nodes.length} equal branches; show all`}
            onClick={() => setOpen(!isOpen)}
          >
            ×{nodes.length}
          </button>
        )}
      </li>
      {isOpen &&
        nodes
          .slice(1)
          .map((each) => (
            <Child key={each} loom={loom} nodes={[each]} k={loom.tree.siblings(number).indexOf(each) + 1} />
          ))}
    </>
  )
}
