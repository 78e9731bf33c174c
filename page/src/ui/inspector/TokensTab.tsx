/** One token at a time: what may come next here, how likely it is, and taking it. */
import { useEffect, useRef, useState } from 'preact/hooks'
import { parseNumber } from '../../model/heat'
import { type NextTokenRow, nextTokenRows, probabilityNote, samplingFields } from '../../model/next'
import { ending, oneLine, probability, shortName } from '../../model/words'
import * as act from '../../state/actions'
import { provide } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, server } from '../../state/session'
import { settings } from '../../state/settings'
import { NextTokenTable } from './NextTokenTable'
import { KEYED, type NextRequest, useLookup, useNext } from './useNext'
import './tokens.css'

const TOP = 20
const AHEAD = 8

export function TokensTab({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const at = loom.current.value
  const node = loom.tree.get(at)
  const [filter, setFilter] = useState('')
  const [isFar, setFar] = useState(false)
  const [isLong, setLong] = useState(false)
  const box = useRef<HTMLDivElement>(null)
  const maxTop = server.value?.limits['top'] ?? TOP
  const drawing = samplingFields(settings.value)
  const canAsk = node !== undefined && !node.growing && !isReadOnly.value
  const request: NextRequest | null = canAsk
    ? {
        loom: loom.id,
        node: at,
        version: `${node.n_tokens} ${node.text.length} ${node.text.slice(-24)}`,
        top: Math.min(isLong ? 100 : TOP, maxTop),
        ahead: isFar ? AHEAD : 0,
        drawing,
      }
    : null
  const state = useNext(request)
  const lookup = useLookup(request, filter)
  const isHere = state.node === at && state.reply !== null
  const rows = state.reply ? nextTokenRows(state.reply, state.ahead) : []
  const wanted = rows.filter((row) => !filter || matches(row, filter))
  const listed = new Set(wanted.map((row) => row.chance.id))
  const lookedUp = lookup.chances.filter((each) => !listed.has(each.id))
  const take = (id: number) => void act.take(at, [id])
  useEffect(() =>
    provide('digit', (k) => {
      // Digits need a visible table. While the next tokens load, a digit refers to those.
      if (k > KEYED || request === null || !box.current?.offsetParent) return false
      if (!isHere) return state.error === ''
      const row = wanted[k - 1]
      if (row) take(row.chance.id)
      return row !== undefined
    }),
  )
  const note = !node
    ? ''
    : isReadOnly.value
      ? `Read-only: load ${shortName(loom.info.value.model)} to see what comes next.`
      : node.growing
        ? 'This branch is still growing. The next tokens are listed when it has ended.'
        : state.node === at
          ? state.error
          : ''
  return (
    <div class="next" ref={box}>
      <section class="part">
        <label class="caption" for="token-filter">
          After{' '}
          <q class="next-after" dir="auto">
            {tail(loom, at)}
          </q>
        </label>
        <input
          id="token-filter"
          class="field"
          type="search"
          placeholder="Find a token, or #id"
          autocomplete="off"
          spellcheck={false}
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === 'Escape') setFilter('')
            const first = wanted[0]?.chance ?? lookedUp[0]
            if (event.key === 'Enter' && isHere && first) take(first.id)
          }}
        />
        <label class="row">
          <input type="checkbox" checked={isFar} onChange={(event) => setFar(event.currentTarget.checked)} />
          <span title="Shows how greedy decoding would continue after each of the first nine tokens; nothing is added.">
            Look {AHEAD} tokens ahead
          </span>
        </label>
      </section>
      <section class="part" aria-busy={state.isBusy}>
        {note && <p class="caption">{note}</p>}
        {!note && rows.length > 0 && (
          <>
            <NextTokenTable
              rows={wanted}
              lookedUp={lookedUp}
              isDrawn={Object.keys(drawing).length > 0}
              isCurrent={isHere}
              onTake={take}
            />
            {filter !== '' && !wanted.length && !lookedUp.length && (
              <p class="caption">{lookup.error || 'No token has this text.'}</p>
            )}
            {!isLong && !filter && rows.length === TOP && (
              <div class="choices">
                <button type="button" onClick={() => setLong(true)}>
                  Show {Math.min(100, maxTop)}
                </button>
              </div>
            )}
            <dl class="facts">
              <dt title="Entropy of the full distribution, in nats; 0 is certain.">Entropy</dt>
              <dd>{shownNats(state.reply?.entropy)}</dd>
              <dt title="The total probability of the tokens that are not listed.">Rest</dt>
              <dd>{probability(state.reply?.rest ?? null)}</dd>
            </dl>
          </>
        )}
        <p class="caption">{probabilityNote(settings.value)}</p>
      </section>
    </div>
  )
}

const shownNats = (value: number | string | null | undefined): string => {
  const nats = parseNumber(value)
  return nats === null ? '–' : `${Math.abs(nats).toFixed(2)} nats`
}

function matches(row: NextTokenRow, filter: string): boolean {
  if (filter === `#${row.chance.id}`) return true
  return row.chance.text.toLowerCase().includes(filter.toLowerCase())
}

/** The last words before the next token. */
function tail(loom: OpenLoom, at: number): string {
  const texts: string[] = []
  let length = 0
  for (let each: number | null = at; each !== null && length < 28; each = loom.tree.parent(each)) {
    const text = each === 0 ? loom.info.value.prompt : (loom.tree.get(each)?.text ?? '')
    texts.unshift(text)
    length += text.length
  }
  const line = oneLine(texts.join(''), 4000)
  return line.length > 28 ? `…${ending(line, 28)}` : line
}
