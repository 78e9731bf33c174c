import { Dialog } from '../Overlay'

export function StartRun() {
  return <Dialog title="StartRun">…</Dialog>
}
