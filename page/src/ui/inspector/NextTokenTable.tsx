/** Tokens that may come next: likeliest first, each a button that takes it. */
import type { TokenCandidate } from '../../api/client'
import { type NextTokenRow, tokenLabel } from '../../model/next'
import { formatCount, probability } from '../../model/words'
import { KEYED } from './useNext'

interface ChanceTableProps {
  rows: NextTokenRow[]
  /** Tokens that match the typed text, at any rank. */
  lookedUp: TokenCandidate[]
  /** Sampling changes the distribution: both probabilities are shown. */
  isDrawn: boolean
  /** They are of the node where one stands; else of the one before, for a moment. */
  isCurrent: boolean
  onTake: (id: number) => void
}

export function NextTokenTable({ rows, lookedUp, isDrawn, isCurrent, onTake }: ChanceTableProps) {
  return (
    <table class="chances">
      <thead>
        <tr>
          <th scope="col" class="chance-key">
            <span class="visually-hidden">Key</span>
          </th>
          <th scope="col" class="chance-token">
            Token
          </th>
          <th scope="col" title="The model’s probability.">
            p
          </th>
          <th scope="col" title="The summed probability of this token and all likelier ones.">
            sum
          </th>
          {isDrawn && (
            <th scope="col" title="The probability when sampling: after temperature and filters.">
              sampled
            </th>
          )}
        </tr>
      </thead>
      <tbody>
        {rows.map((row, at) => (
          <Row
            key={row.chance.id}
            chance={row.chance}
            mark={at < KEYED && isCurrent ? String(at + 1) : ''}
            sum={row.cumulative}
            isDrawn={isDrawn}
            ahead={row.ahead}
            onTake={onTake}
          />
        ))}
        {lookedUp.map((each) => (
          <Row
            key={each.id}
            chance={each}
            mark=""
            sum={null}
            isDrawn={isDrawn}
            ahead={null}
            isLookedUp
            onTake={onTake}
          />
        ))}
      </tbody>
    </table>
  )
}

interface RowProps {
  chance: TokenCandidate
  mark: string
  sum: number | null
  isDrawn: boolean
  ahead: string | null
  isLookedUp?: boolean
  onTake: (id: number) => void
}

function Row({ chance, mark, sum, isDrawn, ahead, isLookedUp, onTake }: RowProps) {
  const isOut = isDrawn && chance.p_sampled === 0
  const place = `rank ${formatCount(chance.rank + 1)}`
  return (
    <tr class={isOut ? 'is-out' : ''} data-token-id={chance.id}>
      <td class="chance-key">{mark && <kbd>{mark}</kbd>}</td>
      <td class="chance-token">
        <button
          type="button"
          title={`${place} · #${chance.id}${isOut ? ' · removed by the filters' : ''}`}
          onClick={() => onTake(chance.id)}
        >
          <span class="chance-text">{tokenLabel(chance)}</span>
          {isLookedUp && <span class="chance-ahead">{place}</span>}
          {ahead !== null && <span class="chance-ahead">{ahead.replace(/\s+/g, ' ') || 'end'}</span>}
          <span class="chance-bar" aria-hidden style={{ '--p': chance.p }} />
        </button>
      </td>
      <td>{probability(chance.p)}</td>
      <td class="muted">{sum === null ? '' : probability(sum)}</td>
      {isDrawn && <td>{probability(chance.p_sampled ?? null)}</td>}
    </tr>
  )
}
