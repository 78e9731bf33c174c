/** The model that grows the loom, or that has to be loaded for that. */
import { loadingModel, model, open } from '../../state/session'
import { overlay } from '../../state/view'

export function ModelChip() {
  const loading = loadingModel.value
  const name = model.value?.id ?? loading?.id ?? open.value?.info.value.model ?? 'no model'
  const says = model.value ? name : loading ? `loading ${name}` : `${name} is not loaded`
  return (
    <button
      type="button"
      class="button plain caption"
      title="Models"
      onClick={() => (overlay.value = 'models')}
    >
      {says}
    </button>
  )
}
