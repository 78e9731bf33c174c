/** All looms, to go to one. */
import { Plus } from 'lucide-preact'
import { closeOverlay, Dialog } from '../Dialog'
import { LoomList } from './LoomList'

export function Looms() {
  const begin = () => {
    closeOverlay()
    location.hash = ''
  }
  return (
    <Dialog title="Looms" width={640}>
      <div class="column">
        <LoomList onOpen={closeOverlay} />
        <div class="row">
          <button type="button" class="button" onClick={begin}>
            <Plus aria-hidden /> New loom <kbd>Alt+N</kbd>
          </button>
        </div>
      </div>
    </Dialog>
  )
}
