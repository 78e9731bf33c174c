/** The result of a search: its answer, why it was chosen, whether it is right, and the other answers. */
import { groupFacts, reasonText } from '../../model/run'
import type { OpenLoom } from '../../state/loom'
import type { LiveRun } from '../../state/searches'

export function RunAnswer({ loom, run }: { loom: OpenLoom; run: LiveRun }) {
  loom.tree.version.value
  const { result } = run
  if (!result) {
    const message = run.status === 'cancelled' ? 'Stopped before there was an answer.' : ''
    return message ? (
      <section class="part">
        <p class="caption">{message}</p>
      </section>
    ) : null
  }
  const { best, answers, measure } = result
  const isThere = (node: number) => loom.tree.get(node) !== undefined
  return (
    <section class="part" aria-label="Answer">
      <p class="run-answer">{result.answer || 'No answer.'}</p>
      {result.reason && <p class="caption run-reason">Chosen because {reasonText(result.reason)}.</p>}
      <p class={`caption ${result.solved === true ? 'is-right' : result.solved === false ? 'warn' : ''}`}>
        {result.solved === true
          ? 'Checked: correct.'
          : result.solved === false
            ? 'Checked: no candidate is correct; this one ranked best.'
            : 'Not verified.'}
      </p>
      <div class="actions">
        <button type="button" class="button" disabled={!isThere(best)} onClick={() => loom.navigate(best)}>
          Go to the answer
        </button>
      </div>
      {measure && <p class="caption run-measure">Ranked by the {measure}.</p>}
      {answers.length > 0 && (
        <ol class="answers" aria-label="Answers">
          {answers.map((each) => (
            <li key={String(each.answer)} class="answer">
              <button
                type="button"
                disabled={!each.nodes.some(isThere)}
                title="Go to the first of these texts"
                onClick={() => loom.navigate(each.nodes.find(isThere)!)}
              >
                <span class="cut" dir="auto">
                  {each.answer === null ? 'no answer could be read' : String(each.answer)}
                </span>
                <span class="caption">{groupFacts(each, measure)}</span>
                <span class="run-line" aria-hidden style={{ '--p': each.share }} />
              </button>
            </li>
          ))}
        </ol>
      )}
    </section>
  )
}
