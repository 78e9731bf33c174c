/** A loom was asked for that is not there: why, and what can be done. */

import { restore } from '../../state/actions'
import { missing } from '../../state/session'
import { sentence } from '../../state/toasts'
import { TextButton } from '../Button'

export function Missing() {
  const told = missing.value
  if (!told) return null
  return (
    <div class="missing column" role="alert">
      <p>{told.wasRemoved ? `The loom “${told.name}” was removed.` : sentence(told.error)}</p>
      <div class="row">
        {told.wasRemoved && <TextButton onClick={() => void restore(told.name)}>Restore</TextButton>}
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
