/** Words for where the KV of a node's path is. */
import type { Schemas } from '../api/client'

type NodeKv = Schemas['NodeKv']

export const WARMTH: Record<NodeKv['state'], string> = {
  hot: 'in memory',
  host: 'in host memory, copied back when needed',
  partly: 'partly in memory',
  cold: 'not in memory, recomputed when needed',
}

/** One line, for a tooltip. */
export const warmthWords = (kv: NodeKv) => `KV ${WARMTH[kv.state]}${kv.pinned ? ' (pinned)' : ''}`

/** The text for screen readers; undefined: the row has no KV. */
export function warmthSpoken(kv: NodeKv | undefined): string | undefined {
  if (kv?.state !== 'hot' && kv?.state !== 'host') return undefined
  return `KV ${kv.state === 'hot' ? 'in memory' : 'in host memory'}${kv.pinned ? ', pinned' : ''}`
}
