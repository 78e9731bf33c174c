/** How branches are grown, and the button that grows them. */
import { ListRestart } from 'lucide-preact'
import { NUMBER_FIELDS, SAMPLERS } from '../../model/fields'
import { plural, shortName } from '../../model/words'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, models } from '../../state/session'
import {
  blocked,
  fieldErrors,
  forgetOwn,
  hasOwn,
  isSame,
  LENGTHS,
  NEUTRAL,
  ownSettings,
  type Settings,
  scope,
  set,
  settings,
  shownSettings,
  withModels,
} from '../../state/settings'
import { showsMoreSamplers } from '../../state/view'
import { IconButton } from '../Button'
import { Choice } from '../Choice'
import { chosenModels, ModelChecks } from '../model/GrowWith'
import { Biases, CheckRow, ConstraintField, ListField } from './Advanced'
import { NumberRow } from './NumberRow'
import { Presets } from './Presets'

const SCOPES = [
  { value: 'action', label: 'Next time', title: 'Changes apply to the next growth only.' },
  { value: 'loom', label: 'This loom', title: 'Changes apply to this loom.' },
  { value: 'default', label: 'Default', title: 'Changes apply to all looms without their own settings.' },
] as const

export function GenerateTab({ loom }: { loom: OpenLoom }) {
  const shown = shownSettings.value
  const own = Object.keys(ownSettings.value).length
  return (
    <div class="generate">
      <GrowButton loom={loom} />
      <section class="part" aria-label="Changes apply to">
        <div class="row">
          <Choice
            label="Settings of"
            values={SCOPES}
            chosen={scope.value}
            onChoose={(to) => (scope.value = to)}
          />
          <span class="grow" />
          {own > 0 && (
            <IconButton
              icon={ListRestart}
              label={`Reset ${plural(own, 'setting')} of ${scope.value === 'loom' ? 'this loom' : 'the next growth'}`}
              onClick={() => forgetOwn(scope.value)}
            />
          )}
        </div>
        <p class="caption">
          {scope.value === 'default' && hasOwn.value
            ? 'This loom has its own settings, which override these.'
            : SCOPES.find(({ value }) => value === scope.value)!.title}
        </p>
      </section>
      <section class="part" aria-label="Number and length">
        <NumberRow name="n" value={shown.n} />
        <NumberRow name="max_tokens" value={shown.max_tokens} />
        <div class="choices" role="group" aria-label="Length">
          {Object.entries(LENGTHS).map(([name, n]) => (
            <button
              key={name}
              type="button"
              aria-pressed={shown.max_tokens === n}
              title={plural(n, 'token')}
              onClick={() => set({ max_tokens: n })}
            >
              {name}
            </button>
          ))}
        </div>
      </section>
      {models.value.filter((each) => each.state === 'ready').length > 1 && (
        <section class="part" aria-label="Grow with">
          <h2>Grow with</h2>
          <ModelChecks chosen={chosenModels(shown)} onChange={(ids) => set({ models: ids })} />
        </section>
      )}
      <Presets />
      <section class="part" aria-label="Sampling">
        <NumberRows of="main" shown={shown} />
        <MoreSamplers shown={shown} />
      </section>
      <section class="part" aria-label="Stop, seed and output">
        <ListField name="stop" values={shown.stop} placeholder="text, e.g. \n\n" />
        <NumberRow name="seed" value={shown.seed} />
        <ConstraintField constraint={shown.constraint} />
      </section>
    </div>
  )
}

function NumberRows({ of, shown }: { of: 'main' | 'more'; shown: Settings }) {
  return SAMPLERS.filter((name) => NUMBER_FIELDS[name].sampler === of).map((name) => (
    <NumberRow key={name} name={name} value={shown[name]} />
  ))
}

/** Samplers that few calls need. What is set or wrong in the fold is counted outside. */
function MoreSamplers({ shown }: { shown: Settings }) {
  const names = SAMPLERS.filter((name) => NUMBER_FIELDS[name].sampler === 'more')
  const others = [
    'temperature_first',
    'dry_sequence_breakers',
    'bad_words',
    'stop_token_ids',
    'allowed_token_ids',
  ] as const
  const changed = [...names, ...others].filter((name) => !isSame(shown[name], NEUTRAL[name]))
  const n = changed.length + shown.logit_bias.length
  const isWrong = ['logit_bias', ...names, ...others].some((name) => fieldErrors.value.has(name))
  return (
    <details
      class="more-samplers"
      open={showsMoreSamplers.value || isWrong}
      onToggle={(event) => (showsMoreSamplers.value = event.currentTarget.open)}
    >
      <summary>More samplers{n > 0 && <span class="caption"> · {n} set</span>}</summary>
      <CheckRow name="temperature_first" value={shown.temperature_first} />
      <ListField name="bad_words" values={shown.bad_words} placeholder="text" />
      <ListField name="stop_token_ids" values={shown.stop_token_ids} placeholder="whole numbers" />
      <ListField name="allowed_token_ids" values={shown.allowed_token_ids} placeholder="all" />
      <NumberRows of="more" shown={shown} />
      <ListField
        name="dry_sequence_breakers"
        values={shown.dry_sequence_breakers}
        placeholder="text, e.g. \n"
      />
      <Biases biases={shown.logit_bias} />
    </details>
  )
}

function GrowButton({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const node = loom.tree.get(loom.current.value)
  const wrong = blocked.value
  const note = isReadOnly.value
    ? `Read-only: load ${shortName(loom.info.value.model)} to grow.`
    : (wrong ?? (node?.ended ? 'This node has ended. New branches continue past its end.' : null))
  return (
    <div class="part grow-part">
      <button
        type="button"
        class="button"
        disabled={isReadOnly.value || wrong !== null}
        onClick={() => void act.grow(loom.current.peek())}
      >
        Grow {plural(settings.value.n, 'branch', 'branches')}
        {withModels.value} <kbd>{keyFor('grow')}</kbd>
      </button>
      {note && <p class={`caption ${wrong ? 'error' : 'warn'}`}>{note}</p>}
    </div>
  )
}
