/** What a search has found, as a list: what stands around each hit. */
import { useState } from 'preact/hooks'
import { type Found, inUnits, type Piece, snippet } from '../../model/finding'
import { titleOf } from '../../model/words'
import { everywhere, hits } from '../../state/finding'
import type { OpenLoom } from '../../state/loom'
import { linkTo } from '../../state/session'

const MOST = 100 // shown at a time

export function HitsHere({ loom }: { loom: OpenLoom }) {
  const [most, setMost] = useState(MOST)
  const found = hits.value?.found
  if (!found) return null
  const current = loom.current.value
  return (
    <ul class="hits" aria-label="Results">
      {found.slice(0, most).map((each) => (
        <li key={each.node} aria-current={each.node === current ? 'true' : undefined} data-hit={each.node}>
          <button type="button" onClick={() => loom.go(each.node)}>
            <Snippet pieces={snippet(each)} />
          </button>
        </li>
      ))}
      {found.length > most && (
        <li>
          <button type="button" class="caption" onClick={() => setMost(most + MOST)}>
            Show more
          </button>
        </li>
      )}
    </ul>
  )
}

export function HitsEverywhere() {
  const told = everywhere.value
  if (!told) return null
  return (
    <ul class="hits" aria-label="Results">
      {told.data.map((each) => {
        const found: Found = { node: each.node, text: each.text, spans: inUnits(each.text, each.spans ?? []) }
        return (
          <li key={`${each.loom}/${each.node}`}>
            <a href={linkTo(each.name, each.node)}>
              <span class="caption cut">{titleOf(each)}</span>
              <Snippet pieces={snippet(found)} />
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
