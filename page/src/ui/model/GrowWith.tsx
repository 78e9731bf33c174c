/** Choose the models of one growth, or of a loom. */
import { useState } from 'preact/hooks'
import { plural, shortName } from '../../model/words'
import * as act from '../../state/actions'
import { model, models, open } from '../../state/session'
import { growingModels, set, settings } from '../../state/settings'
import { TextButton } from '../Button'
import { closeOverlay, Dialog } from '../Dialog'

/** Models to choose, the loom's own first. Nothing is drawn where there is only one. */
export function ModelChecks(props: { chosen: readonly string[]; onChange: (ids: string[]) => void }) {
  const own = model.value?.id
  const ready = models.value.filter((each) => each.state === 'ready')
  const all = [...ready.filter((each) => each.id === own), ...ready.filter((each) => each.id !== own)]
  const isChat = open.value?.isChat ?? false
  const toggle = (id: string, isOn: boolean) => {
    const ids = isOn ? [...props.chosen, id] : props.chosen.filter((each) => each !== id)
    props.onChange(ids.length || own === undefined ? ids : [own])
  }
  return (
    <ul class="model-checks" aria-label="Models that grow">
      {all.map((each) => {
        const cannot = isChat && !each.has_chat_template
        return (
          <li key={each.id}>
            <label
              class="row"
              title={cannot ? 'This model has no chat template, but this loom is a chat.' : each.id}
            >
              <input
                type="checkbox"
                checked={props.chosen.includes(each.id)}
                disabled={cannot}
                onChange={(event) => toggle(each.id, event.currentTarget.checked)}
              />
              <span class="cut">{shortName(each.id)}</span>
              {each.id === own && <span class="caption">this loom’s</span>}
              {cannot && <span class="caption">no chat template</span>}
            </label>
          </li>
        )
      })}
    </ul>
  )
}

/** The ids of the models that grow now. */
export const chosenModels = (from = settings.value): string[] => {
  const chosen = growingModels(from).map((each) => each.id)
  return chosen.length || !model.value ? chosen : [model.value.id]
}

export function GrowWith() {
  const [checked, setChecked] = useState(() => chosenModels())
  const [isKept, setKept] = useState(false)
  const { n } = settings.value
  const chosen = chosenModels({ ...settings.value, models: checked }) // another client may unload a model
  const loom = open.value
  if (!loom) return null
  const grow = () => {
    closeOverlay()
    if (isKept) set({ models: chosen }, 'loom')
    void act.grow(loom.current.peek(), { models: chosen })
  }
  return (
    <Dialog title="Grow with" width={420}>
      <form
        class="column"
        onSubmit={(event) => {
          event.preventDefault()
          grow()
        }}
      >
        <ModelChecks chosen={chosen} onChange={setChecked} />
        <p class="caption">
          {chosen.length > 1
            ? `${plural(n, 'branch', 'branches')} with each model, side by side. `
            : `${plural(n, 'branch', 'branches')}. `}
          A model with other tokens adds only its text, without probabilities.
        </p>
        <label class="row">
          <input
            type="checkbox"
            checked={isKept}
            onChange={(event) => setKept(event.currentTarget.checked)}
          />
          Use for this loom from now on
        </label>
        <div class="row" style={{ justifyContent: 'flex-end' }}>
          <TextButton kind="main" type="submit" disabled={!chosen.length}>
            Grow
          </TextButton>
        </div>
      </form>
    </Dialog>
  )
}
