/** What a search found: its answer, whether that is right, and how many branches gave it. */
import { plural } from '../../model/words'
import type { LiveRun, OpenLoom } from '../../state/loom'

export function RunAnswer({ loom, run }: { loom: OpenLoom; run: LiveRun }) {
  loom.tree.version.value
  const { result } = run
  if (!result) {
    const says = run.status === 'cancelled' ? 'Stopped before there was an answer.' : ''
    return says ? (
      <section class="part">
        <p class="caption">{says}</p>
      </section>
    ) : null
  }
  const best = result.best ?? null
  const votes = result.votes ?? []
  const most = Math.max(1, ...votes.map((each) => each.count))
  const isThere = best !== null && loom.tree.get(best) !== undefined
  return (
    <section class="part" aria-label="Answer">
      <p class="run-answer">{result.answer || 'No answer.'}</p>
      <p class={`caption ${result.solved === true ? 'is-right' : result.solved === false ? 'warn' : ''}`}>
        {result.solved === true
          ? 'Checked: it is right.'
          : result.solved === false
            ? 'Checked: nothing that was found is right; this looked best.'
            : 'Not verified.'}
        {!run.rounds.length && ' It stood in the tree already.'}
      </p>
      {votes.length > 0 && (
        <ol class="votes" aria-label="Votes">
          {votes.map((each) => (
            <li key={String(each.answer)} class="vote">
              <span class="grow cut">{String(each.answer)}</span>
              <span>{plural(each.count, 'vote')}</span>
              <span class="run-line" aria-hidden style={{ '--p': each.count / most }} />
            </li>
          ))}
        </ol>
      )}
      <div class="actions">
        <button
          type="button"
          class="button"
          disabled={!isThere}
          onClick={() => best !== null && loom.go(best)}
        >
          Go to the best
        </button>
      </div>
    </section>
  )
}
