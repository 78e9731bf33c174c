/** The candidates of a round: kept ones first, others dimmed, each with a bar for its score. */
import { type CandidateRow, candidateRows, type Round, scoreText } from '../../model/run'
import { oneLine } from '../../model/words'
import type { OpenLoom } from '../../state/loom'

export function Candidates({ loom, round }: { loom: OpenLoom; round: Round }) {
  loom.tree.version.value
  const rows = candidateRows(round)
  const kept = rows.filter((each) => each.isKept).length
  return (
    <>
      <p class="caption">
        {kept === rows.length ? `${rows.length} generated` : `${kept} of ${rows.length} kept`}
      </p>
      <ul class="candidates" aria-label={`Candidates of round ${round.round}`}>
        {rows.map((each) => (
          <Candidate key={each.node} loom={loom} row={each} />
        ))}
      </ul>
    </>
  )
}

function Candidate({ loom, row }: { loom: OpenLoom; row: CandidateRow }) {
  const node = loom.tree.get(row.node)
  const text = node ? oneLine(node.text, 60) : 'removed'
  return (
    <li
      class={`candidate ${row.isKept ? '' : 'is-pruned'}`}
      data-candidate={row.node}
      aria-current={loom.current.value === row.node ? 'true' : undefined}
    >
      <button
        type="button"
        disabled={!node}
        title={row.isKept ? 'Kept by the search.' : 'Dropped by the search.'}
        onClick={() => loom.navigate(row.node)}
      >
        <span class="grow cut" dir="auto">
          {text || '(ended immediately)'}
        </span>
        {row.times > 1 && <span class="muted">×{row.times}</span>}
        {row.by && <span class="muted">{row.by}</span>}
        <span class="candidate-bar" aria-hidden style={{ '--p': row.bar }} />
        <span class="candidate-score">{scoreText(row.score)}</span>
      </button>
    </li>
  )
}
