import type { OpenLoom } from '../../state/loom'
export function TokensTab(_: { loom: OpenLoom }) {
  return null
}
