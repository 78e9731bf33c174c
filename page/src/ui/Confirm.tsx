/** A question before something large. */
import { question } from '../state/actions'
import { TextButton } from './Button'
import { Dialog } from './Dialog'

export function Confirm() {
  const current = question.value
  if (!current) return null
  return (
    <Dialog title={current.title} width={420} onClose={() => current.answer(false)}>
      <div class="column">
        <p>{current.text}</p>
        <div class="row" style={{ justifyContent: 'flex-end' }}>
          <TextButton onClick={() => current.answer(false)}>Cancel</TextButton>
          <TextButton kind="main" onClick={() => current.answer(true)}>
            {current.yes}
          </TextButton>
        </div>
      </div>
    </Dialog>
  )
}
