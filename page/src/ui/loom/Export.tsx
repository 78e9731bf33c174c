import { Dialog } from '../Overlay'

export function Export() {
  return <Dialog title="Export">…</Dialog>
}
