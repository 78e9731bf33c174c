/** A line above the panes: what keeps the open loom from being grown, and the way out. */
import { shortName } from '../model/words'
import { restore } from '../state/actions'
import { loadModel } from '../state/loading'
import type { OpenLoom } from '../state/loom'
import { cannotGrow, isReadOnly, loadingModel, models } from '../state/session'
import { overlay } from '../state/view'
import { TextButton } from './Button'
import { ModelState } from './model/ModelState'

export function Notice({ loom }: { loom: OpenLoom }) {
  if (loom.gone.value)
    return (
      <div class="notice row" role="status">
        <span class="grow">{cannotGrow.value} You can read it here until you close it.</span>
        {loom.gone.value === 'removed' ? (
          <TextButton onClick={() => void restore(loom.info.peek().name)}>Restore</TextButton>
        ) : (
          <TextButton onClick={() => (overlay.value = 'looms')}>Looms</TextButton>
        )}
      </div>
    )
  if (!isReadOnly.value) return null
  const source = loom.info.value.model
  const known = models.value.some((each) => each.id === source || each.source === source)
  const coming = loadingModel.value
  if (known || (coming && (coming.id === source || coming.source === source)))
    return (
      <div class="notice">
        <ModelState wanted={source} />
      </div>
    )
  return (
    <div class="notice row" role="status">
      <span class="grow">{cannotGrow.value?.replace(/\.$/, '')}</span>
      <TextButton onClick={() => void loadModel({ source })}>Load {shortName(source)}</TextButton>
      <TextButton kind="plain" onClick={() => (overlay.value = 'models')}>
        Models
      </TextButton>
    </div>
  )
}
