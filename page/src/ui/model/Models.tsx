import { Dialog } from '../Overlay'

export function Models() {
  return <Dialog title="Models">…</Dialog>
}
