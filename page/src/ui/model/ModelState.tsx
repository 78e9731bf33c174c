/** A model that is loading, could not be loaded, or is not there: how far, why, and what to do. */
import { loading } from '../../model/progress'
import { shortName } from '../../model/words'
import { loadModel, unloadModel } from '../../state/loading'
import { loadingModel, models, server } from '../../state/session'
import { sentence } from '../../state/toasts'
import { overlay } from '../../state/view'
import { TextButton } from '../Button'
import './model.css'

/** wanted: the source of the model that is waited for; any other one will do where it is null. */
export function ModelState({ wanted = null }: { wanted?: string | null }) {
  const isWanted = (each: { id: string; source: string }) =>
    wanted === null || each.id === wanted || each.source === wanted
  const coming = loadingModel.value
  const broken = models.value.find((each) => each.state === 'failed' && isWanted(each))
  if (server.value === null) return null
  if (coming && isWanted(coming)) {
    const { words, share } = loading(coming.progress)
    return (
      <div class="model-state row" role="status">
        <span class="grow" data-varies>
          Loading {shortName(coming.id)}. {words}.
        </span>
        <Progress share={share} label={`Loading ${shortName(coming.id)}`} />
        <TextButton onClick={() => void unloadModel(coming.id)}>Cancel</TextButton>
      </div>
    )
  }
  if (broken)
    return (
      <div class="model-state row" role="alert">
        <div class="grow">
          <p class="error">{shortName(broken.id)} could not be loaded.</p>
          <p>{sentence(broken.error?.message ?? '')}</p>
          {broken.error?.hint && <p class="muted">{sentence(broken.error.hint)}</p>}
        </div>
        <TextButton
          onClick={() => void unloadModel(broken.id).then(() => loadModel({ source: broken.source }))}
        >
          Try again
        </TextButton>
        <TextButton onClick={() => (overlay.value = 'models')}>Models</TextButton>
      </div>
    )
  if (wanted !== null) return null
  return (
    <div class="model-state row" role="status">
      <span class="grow">No model is loaded, so nothing can grow yet.</span>
      <TextButton onClick={() => void loadModel({ source: 'tiny' })}>Load tiny</TextButton>
      <TextButton onClick={() => (overlay.value = 'models')}>Models</TextButton>
    </div>
  )
}

/** How far something is; without a share only that it goes on. */
export function Progress({ share, label }: { share: number | null; label: string }) {
  return (
    <progress class="progress" aria-label={label} max={1} {...(share === null ? {} : { value: share })} />
  )
}
