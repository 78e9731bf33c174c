import type { OpenLoom } from '../../state/loom'
export function RunTab(_: { loom: OpenLoom }) {
  return null
}
