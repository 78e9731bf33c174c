import { Dialog } from '../Overlay'

export function Import() {
  return <Dialog title="Import">…</Dialog>
}
