/** Notes at the foot of the page. */
import { X } from 'lucide-preact'
import { dismiss, type Toast, toasts } from '../state/toasts'
import { IconButton } from './Button'
import './toasts.css'

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((each) => (
        <Note key={each.id} note={each} />
      ))}
    </div>
  )
}

function Note({ note }: { note: Toast }) {
  const take = (run: () => void) => {
    dismiss(note.id)
    run()
  }
  return (
    <div class={`toast of-${note.kind}`}>
      <div class="grow">
        <p>{note.text}</p>
        {note.detail && <p class="caption">{note.detail}</p>}
        {note.offers.length > 0 && (
          <div class="row offers">
            {note.offers.map((each) => (
              <button key={each.label} type="button" class="button" onClick={() => take(each.run)}>
                {each.label}
              </button>
            ))}
          </div>
        )}
        {note.more && (
          <details class="caption">
            <summary>Details</summary>
            <p>{note.more}</p>
          </details>
        )}
      </div>
      {note.action && (
        <button type="button" class="button plain" onClick={() => take(note.action!.run)}>
          {note.action.label} {note.action.key && <kbd>{note.action.key.toUpperCase()}</kbd>}
        </button>
      )}
      <IconButton icon={X} label="Dismiss" onClick={() => take(note.onDismiss ?? (() => {}))} />
    </div>
  )
}
