/** A question before something large. */
import { question } from '../state/actions'
import { TextButton } from './Button'
import { Dialog } from './Dialog'

export function Confirm() {
  const asked = question.value
  if (!asked) return null
  return (
    <Dialog title={asked.title} width={420} onClose={() => asked.answer(false)}>
      <div class="column">
        <p>{asked.text}</p>
        <div class="row" style={{ justifyContent: 'flex-end' }}>
          <TextButton onClick={() => asked.answer(false)}>Cancel</TextButton>
          <TextButton kind="main" onClick={() => asked.answer(true)}>
            {asked.yes}
          </TextButton>
        </div>
      </div>
    </Dialog>
  )
}
