/** The author, time and settings of a node, and how to reproduce it: here, in a shell and in Python. */

import type { Node } from '../../api/client'
import { SEED_EXCEPTIONS } from '../../model/fields'
import {
  changedParams,
  curl,
  defaultsFor,
  python,
  repeatRequest,
  reproductionCall,
} from '../../model/provenance'
import { shortName } from '../../model/words'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { model, server } from '../../state/session'
import { copyText } from '../copy'
import { type Fact, Facts } from './Facts'
import { moment, operationLabel } from './operations'

interface ProvenanceProps {
  loom: OpenLoom
  node: Node
  known: Node | null
}

export function Provenance({ loom, node, known }: ProvenanceProps) {
  const { name, prompt, chat_template_used } = loom.info.value
  const defaults = defaultsFor(model.value, chat_template_used)
  const request = known ? repeatRequest(known, defaults) : 'Loading.'
  const force = node.parent !== null && loom.tree.get(node.parent)?.ended ? { force: true } : {}
  const copy = (write: typeof curl, what: string) => {
    if (!known) return
    const body = typeof request === 'string' ? request : { ...request, ...force }
    const root = { prompt, template: chat_template_used ?? true }
    const text = write(
      reproductionCall(known, name, body, root),
      location.origin,
      server.value?.is_public ?? false,
    )
    void copyText(text, what)
  }
  const why =
    typeof request === 'string'
      ? request
      : model.value
        ? `The same settings and seed give the same text, but ${SEED_EXCEPTIONS}.`
        : `${shortName(loom.info.value.model)} is not loaded.`
  return (
    <section class="part" aria-label="Origin">
      <Facts of={facts(loom, known)} />
      {node.parent !== null && (
        <div class="actions">
          <button
            type="button"
            class="button"
            disabled={typeof request === 'string' || !model.value || node.growing}
            title={why}
            onClick={() => void act.regenerate(node.node)}
          >
            Regenerate exactly
          </button>
        </div>
      )}
      <div class="actions">
        <button type="button" class="button" disabled={!known} onClick={() => copy(curl, 'the command')}>
          Copy as curl
        </button>
        <button type="button" class="button" disabled={!known} onClick={() => copy(python, 'the program')}>
          Copy as Python
        </button>
      </div>
    </section>
  )
}

function facts(loom: OpenLoom, known: Node | null): (Fact | false | null)[] {
  const origin = known?.made
  const params = known?.params
  return [
    origin
      ? { name: 'Origin', value: operationLabel(origin.kind, origin.actor) }
      : { name: 'Origin', value: known ? '–' : null },
    { name: 'When', value: origin ? moment(origin.at) : known ? '–' : null, varies: true },
    {
      name: 'Model',
      value: shortName(known?.model ?? origin?.model ?? loom.info.value.model),
      hint: origin?.model ? 'The model that generated it.' : 'The model of this loom.',
    },
    ...(params ? changedParams(params).map(([name, value]) => ({ name, value })) : []),
    params && !changedParams(params).length ? { name: 'Sampling', value: 'neutral' } : null,
    params ? { name: 'Max tokens', value: String(params['max_tokens']) } : null,
    params
      ? {
          name: 'Seed',
          value: `${params['seed']}`,
          varies: true,
          hint: 'Reproduces this text together with the branch number.',
        }
      : null,
    params ? { name: 'Branch', value: known.branch == null ? '–' : String(known.branch + 1) } : null,
  ]
}
