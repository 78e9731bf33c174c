/** The card of a token: its probability and its alternatives. */
import { Scissors, SeparatorVertical, Trash2 } from 'lucide-preact'
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { ApiError, type Token, type TokenCandidate } from '../../api/client'
import { parseNumber } from '../../model/heat'
import { pieceOf, piecesOf } from '../../model/pieces'
import { ROOT } from '../../model/tree'
import { shownText } from '../../model/turns'
import { probability, showWhitespace } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import { card, showsSpecial } from '../../state/reading'
import { IconButton } from '../Button'
import { placesOf, rangeOf } from './textPosition'
import { chosen, clipAt, forkAt, splitAt } from './tokens'

export function TokenCard({ loom }: { loom: OpenLoom }) {
  const spot = card.value
  if (!spot) return null
  return <Card key={`${spot.node}/${spot.token}`} loom={loom} node={spot.node} index={spot.token} />
}

function Card({ loom, node, index }: { loom: OpenLoom; node: number; index: number }) {
  const box = useRef<HTMLElement>(null)
  const { token, detailed, problem } = useToken(loom, node, index)
  const [place, setPlace] = useState<{ left: number; top: number } | null>(null)
  const total = loom.tree.get(node)?.n_tokens ?? 0

  useLayoutEffect(() => {
    let isOver = false
    const align = () =>
      void boxOf(loom, node, index).then((at) => {
        if (!isOver && at && box.current) setPlace(cardPosition(at, box.current.getBoundingClientRect()))
      })
    align()
    addEventListener('resize', align)
    addEventListener('scroll', align, { capture: true, passive: true })
    return () => {
      isOver = true
      removeEventListener('resize', align)
      removeEventListener('scroll', align, { capture: true })
    }
  }, [detailed === undefined, problem])

  const p = parseNumber(detailed?.logprob ?? token?.logprob)
  const entropy = parseNumber(detailed?.entropy ?? token?.entropy)
  const rank = detailed?.rank
  return (
    <section
      ref={box}
      class="token-card"
      aria-label="Token"
      data-card={index}
      style={place ? { left: `${place.left}px`, top: `${place.top}px` } : { visibility: 'hidden' }}
      onPointerDown={(event) => event.stopPropagation()}
    >
      <header class="row">
        <span class="token cut">{token ? showWhitespace(token.text) : ' '}</span>
        {token && isPart(token) && <Chips bytes={token.bytes} />}
        <span class="grow" />
        <span class="caption">
          {token && `id ${token.id} · `}
          {index + 1}/{total}
        </span>
      </header>
      <dl class="token-facts caption">
        <dt>p</dt>
        <dd>{p === null ? '–' : probability(Math.exp(p))}</dd>
        <dt>sampled</dt>
        <dd>{detailed?.p_sampled == null ? '–' : probability(detailed.p_sampled)}</dd>
        <dt>rank</dt>
        <dd>{rank == null ? '–' : rank + 1}</dd>
        <dt>entropy</dt>
        <dd>{entropy === null ? '–' : `${entropy.toFixed(2)} nats`}</dd>
        <dt>bytes</dt>
        <dd class="token bytes">{token ? hex(token.bytes) : '–'}</dd>
      </dl>
      {problem ? (
        <p class="caption problem">{problem}</p>
      ) : (
        <Alternatives node={node} index={index} detailed={detailed} />
      )}
      <footer class="row">
        <span class="caption grow" title="Alt-click only forks">
          {node === ROOT ? 'The prompt has no siblings' : 'Click: fork and grow'}
        </span>
        <IconButton
          icon={SeparatorVertical}
          label="Split after this token"
          command="split"
          disabled={index + 1 >= total}
          onClick={() => void splitAt(loom, { node, token: index }, false)}
        />
        <IconButton
          icon={Scissors}
          label="Cut after this token; the rest becomes a child"
          command="clip"
          disabled={index + 1 >= total}
          onClick={() => void clipAt(loom, { node, token: index }, 'keep')}
        />
        <IconButton
          icon={Trash2}
          label="Cut off and discard what follows"
          command="clip-drop"
          disabled={index + 1 >= total}
          onClick={() => void clipAt(loom, { node, token: index }, 'drop')}
        />
      </footer>
    </section>
  )
}

const ROWS = 8

function Alternatives({
  node,
  index,
  detailed,
}: {
  node: number
  index: number
  detailed: Token | undefined
}) {
  const top = detailed?.top ?? []
  const at = chosen.value
  let sum = 0
  const rows = top.map((each) => {
    sum += each.p
    return { ...each, sum }
  })
  const own = detailed && !top.some((each) => each.id === detailed.id) ? detailed : null
  return (
    <ul class="alternatives" aria-label="Alternatives">
      {rows.map((each, i) => (
        <li key={each.id}>
          <button
            type="button"
            class="row"
            aria-current={each.id === detailed?.id || undefined}
            data-chosen={at === i || undefined}
            disabled={node === ROOT || each.id === detailed?.id}
            onClick={(event) => void forkAt({ node, token: index }, each, !event.altKey)}
          >
            <Bar p={each.p} />
            <span class="token cut grow">
              {isPart(each) ? <Chips bytes={each.bytes} /> : showWhitespace(each.text)}
            </span>
            <span class="caption">{probability(each.p)}</span>
            <span class="caption sum">{probability(each.sum)}</span>
          </button>
        </li>
      ))}
      {!rows.length && Array.from({ length: ROWS }, (_, i) => <li key={`row${i}`} class="none" />)}
      <li class="row rest">
        <Bar p={rows.length ? Math.max(0, 1 - sum) : 0} />
        <span class="caption grow">
          {own ? `rest, with ${showWhitespace(own.text)} at ${(own.rank ?? 0) + 1}` : 'rest'}
        </span>
        <span class="caption">{rows.length ? probability(Math.max(0, 1 - sum)) : ''}</span>
        <span class="caption sum" />
      </li>
    </ul>
  )
}

const Bar = ({ p }: { p: number }) => (
  <span class="p-bar" aria-hidden="true" style={{ transform: `scaleX(${Math.min(1, p)})` }} />
)

const Chips = ({ bytes }: { bytes: readonly number[] }) => (
  <span class="chips">
    {bytes.map((each, i) => (
      <span key={i} class="chip token">
        {hex([each])}
      </span>
    ))}
  </span>
)

const hex = (bytes: readonly number[]) => bytes.map((each) => each.toString(16).padStart(2, '0')).join(' ')
const isPart = (token: Token | TokenCandidate) => token.text.includes('\ufffd')

/** The token, immediately, and its alternatives once the server replies. */
function useToken(loom: OpenLoom, node: number, index: number) {
  const [token, setToken] = useState<Token>()
  const [detailed, setDetailed] = useState<Token>()
  const [problem, setProblem] = useState('')
  useEffect(() => {
    let isOver = false
    const fail = (error: unknown) => !isOver && setProblem(why(error))
    loom.tokens.of(node).then((all) => !isOver && setToken(all[index]), fail)
    loom.tokens.at(node, index).then((one) => !isOver && setDetailed(one), fail)
    return () => {
      isOver = true
    }
  }, [])
  return { token, detailed, problem }
}

function why(error: unknown): string {
  if (!(error instanceof ApiError)) return String(error)
  if (error.code === 'node_generating') return 'Still growing: alternatives are shown when it has ended.'
  if (error.code === 'model_not_loaded') return 'Load the model to see alternatives.'
  return error.message
}

/** The box of a token on the screen. */
async function boxOf(loom: OpenLoom, number: number, index: number): Promise<DOMRect | null> {
  const element = document.querySelector(`.path [data-node="${number}"]`)
  const node = loom.tree.get(number)
  if (!element || !node) return null
  const tokens = await loom.tokens.of(number).catch(() => null)
  const shown = shownText(node, loom.info.peek(), showsSpecial.peek())
  const piece = tokens && pieceOf(piecesOf(tokens, shown) ?? [], index)
  const boxes = piece ? placesOf(rangeOf(element, piece.start, piece.end)) : []
  if (!boxes.length) return null
  // A token may begin with the blank that ends a line: the card keeps off both lines.
  const widest = boxes.reduce((one, other) => (other.width > one.width ? other : one))
  const top = Math.min(...boxes.map((each) => each.top))
  const bottom = Math.max(...boxes.map((each) => each.bottom))
  return new DOMRect(widest.left, top, widest.width, bottom - top)
}

const APART = 8
const EDGE = 8

/** Above the line, as one reads on below it; below where there is no room. Never off the screen. */
function cardPosition(token: DOMRect, size: DOMRect): { left: number; top: number } {
  const above = token.top - APART - size.height
  const below = token.bottom + APART
  const top = above >= EDGE ? above : Math.min(below, innerHeight - size.height - EDGE)
  const left = Math.max(EDGE, Math.min(token.left - 16, innerWidth - size.width - EDGE))
  return { left, top: Math.max(EDGE, top) }
}
