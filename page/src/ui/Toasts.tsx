/** Notes at the foot of the page. */
import { X } from 'lucide-preact'
import { dismiss, toasts } from '../state/toasts'
import { IconButton } from './Button'
import './toasts.css'

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((each) => (
        <div key={each.id} class={`toast ${each.kind}`}>
          <div class="grow">
            <p>{each.text}</p>
            {each.detail && <p class="caption">{each.detail}</p>}
          </div>
          {each.action && (
            <button
              type="button"
              class="button plain"
              onClick={() => {
                dismiss(each.id)
                each.action!.run()
              }}
            >
              {each.action.label} {each.action.key && <kbd>{each.action.key.toUpperCase()}</kbd>}
            </button>
          )}
          <IconButton icon={X} label="Dismiss" onClick={() => dismiss(each.id)} />
        </div>
      ))}
    </div>
  )
}
