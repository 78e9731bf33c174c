/** The hits of a search as a list, with the text around each. */
import { useState } from 'preact/hooks'
import { inUnits, type Match, type Piece, snippet } from '../../model/finding'
import { titleOf } from '../../model/words'
import { everywhere, hits } from '../../state/finding'
import type { OpenLoom } from '../../state/loom'
import { linkTo } from '../../state/session'

const PAGE = 100 // shown at a time

export function HitsHere({ loom }: { loom: OpenLoom }) {
  const [limit, setLimit] = useState(PAGE)
  const matches = hits.value?.matches
  if (!matches) return null
  const current = loom.current.value
  return (
    <ul class="hits" aria-label="Results">
      {matches.slice(0, limit).map((each) => (
        <li key={each.node} aria-current={each.node === current ? 'true' : undefined} data-hit={each.node}>
          <button type="button" onClick={() => loom.navigate(each.node)}>
            <Snippet pieces={snippet(each)} />
          </button>
        </li>
      ))}
      {matches.length > limit && (
        <li>
          <button type="button" class="caption" onClick={() => setLimit(limit + PAGE)}>
            Show more
          </button>
        </li>
      )}
    </ul>
  )
}

export function HitsEverywhere() {
  const reply = everywhere.value
  if (!reply) return null
  return (
    <ul class="hits" aria-label="Results">
      {reply.data.map((each) => {
        const match: Match = { node: each.node, text: each.text, spans: inUnits(each.text, each.spans ?? []) }
        return (
          <li key={`${each.loom}/${each.node}`}>
            <a href={linkTo(each.name, each.node)}>
              <span class="caption cut">{titleOf(each)}</span>
              <Snippet pieces={snippet(match)} />
            </a>
          </li>
        )
      })}
    </ul>
  )
}

function Snippet({ pieces }: { pieces: readonly Piece[] }) {
  return (
    <span class="snippet" dir="auto">
      {pieces.map((each, i) => (each.isMarked ? <mark key={i}>{each.text}</mark> : each.text))}
    </span>
  )
}
