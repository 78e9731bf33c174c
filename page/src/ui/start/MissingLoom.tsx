/** The screen for a loom that does not exist: the reason and the possible actions. */

import { restore } from '../../state/actions'
import { GONE, missing } from '../../state/session'
import { sentence } from '../../state/toasts'
import { TextButton } from '../Button'

export function MissingLoom() {
  const current = missing.value
  if (!current) return null
  return (
    <div class="missing column" role="alert">
      <p>{current.wasRemoved ? GONE.removed : sentence(current.error)}</p>
      <div class="row">
        {current.wasRemoved && <TextButton onClick={() => void restore(current.name)}>Restore</TextButton>}
        <TextButton
          kind="plain"
          onClick={() => {
            location.hash = ''
          }}
        >
          New loom
        </TextButton>
      </div>
    </div>
  )
}
