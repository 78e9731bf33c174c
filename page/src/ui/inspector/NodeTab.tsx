import type { OpenLoom } from '../../state/loom'
export function NodeTab(_: { loom: OpenLoom }) {
  return null
}
