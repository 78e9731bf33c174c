/** The model that grows the loom, or that has to be loaded for that. */
import { shortName } from '../../model/words'
import { loadingModel, model, open, server } from '../../state/session'
import { overlay } from '../../state/view'
import './model.css'

export function ModelChip() {
  const loading = loadingModel.value
  const full = model.value?.id ?? loading?.id ?? open.value?.info.value.model ?? null
  const name = full && shortName(full)
  const state = model.value ? 'ready' : loading ? 'loading' : 'none'
  const hint = {
    ready: name,
    loading: `Loading ${name}`,
    none: server.value === null ? '' : name === null ? 'No model' : `${name} is not loaded`,
  }[state]
  return (
    <button
      type="button"
      class={`button plain model-chip ${state}`}
      title="Models  Shift+M"
      aria-label={`Models: ${hint}`}
      onClick={() => (overlay.value = 'models')}
    >
      <span class="dot" aria-hidden />
      <span class="cut">{hint}</span>
    </button>
  )
}
