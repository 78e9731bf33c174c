import { Dialog } from '../Overlay'

export function Looms() {
  return <Dialog title="Looms">…</Dialog>
}
