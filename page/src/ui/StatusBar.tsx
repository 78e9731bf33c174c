/** The foot of the page: connection, what grows, the heat's legend, and what sharing has saved. */
import type { OpenLoom } from '../state/loom'
import { isAway } from '../state/session'
import './status.css'

export function StatusBar({ loom }: { loom: OpenLoom }) {
  const isLost = isAway.value || !loom.feed.isConnected.value
  return (
    <footer class="status row">
      {isLost && <span class="error">Reconnecting. Nothing is lost.</span>}
      <span class="grow" />
    </footer>
  )
}
