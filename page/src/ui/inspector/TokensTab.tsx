/** One token at a time: what may come next here, how likely it is, and taking it. */
import { useEffect, useRef, useState } from 'preact/hooks'
import { figure } from '../../model/heat'
import { type ChanceRow, chanceRows, drawingAsked, drawingSays } from '../../model/next'
import { ending, oneLine, probability, shortName } from '../../model/words'
import * as act from '../../state/actions'
import { provide } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, server } from '../../state/session'
import { settings } from '../../state/settings'
import { ChanceTable } from './ChanceTable'
import { type Asked, KEYED, useLookup, useNext } from './useNext'
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
  const most = server.value?.limits['top'] ?? TOP
  const drawing = drawingAsked(settings.value)
  const canAsk = node !== undefined && !node.growing && !isReadOnly.value
  const asked: Asked | null = canAsk
    ? {
        loom: loom.id,
        node: at,
        version: `${node.n_tokens} ${node.text.length} ${node.text.slice(-24)}`,
        top: Math.min(isLong ? 100 : TOP, most),
        ahead: isFar ? AHEAD : 0,
        drawing,
      }
    : null
  const told = useNext(asked)
  const found = useLookup(asked, filter)
  const isHere = told.node === at && told.reply !== null
  const rows = told.reply ? chanceRows(told.reply, told.ahead) : []
  const wanted = rows.filter((row) => !filter || matches(row, filter))
  const listed = new Set(wanted.map((row) => row.chance.id))
  const lookedUp = found.chances.filter((each) => !listed.has(each.id))
  const take = (id: number) => void act.take(at, [id])
  useEffect(() =>
    provide('digit', (k) => {
      // Nobody takes what they cannot see; while the next ones are on their way a digit means them.
      if (k > KEYED || asked === null || !box.current?.offsetParent) return false
      if (!isHere) return told.error === ''
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
        : told.node === at
          ? told.error
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
      <section class="part" aria-busy={told.isBusy}>
        {note && <p class="caption">{note}</p>}
        {!note && rows.length > 0 && (
          <>
            <ChanceTable
              rows={wanted}
              lookedUp={lookedUp}
              isDrawn={Object.keys(drawing).length > 0}
              isCurrent={isHere}
              onTake={take}
            />
            {filter !== '' && !wanted.length && !lookedUp.length && (
              <p class="caption">{found.error || 'No token has this text.'}</p>
            )}
            {!isLong && !filter && rows.length === TOP && (
              <div class="choices">
                <button type="button" onClick={() => setLong(true)}>
                  Show {Math.min(100, most)}
                </button>
              </div>
            )}
            <dl class="facts">
              <dt title="Entropy of the full distribution, in nats; 0 is certain.">Entropy</dt>
              <dd>{shownNats(told.reply?.entropy)}</dd>
              <dt title="The total probability of the tokens that are not listed.">Rest</dt>
              <dd>{probability(told.reply?.rest ?? null)}</dd>
            </dl>
          </>
        )}
        <p class="caption">{drawingSays(settings.value)}</p>
      </section>
    </div>
  )
}

const shownNats = (value: number | string | null | undefined): string => {
  const nats = figure(value)
  return nats === null ? '–' : `${Math.abs(nats).toFixed(2)} nats`
}

function matches(row: ChanceRow, filter: string): boolean {
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
