import { Dialog } from '../Overlay'

export function Gauge() {
  return <Dialog title="Gauge">…</Dialog>
}
