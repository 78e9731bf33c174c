import type { OpenLoom } from '../../state/loom'
export function LoomTab(_: { loom: OpenLoom }) {
  return null
}
