/** Words for where the KV of a node's path is. */
import type { Schemas } from '../api/client'

type NodeKv = Schemas['NodeKv']

export const WARMTH: Record<NodeKv['state'], string> = {
  hot: 'cached: nothing is computed again',
  host: 'cached in host memory: copied back when needed',
  partly: 'partly cached',
  cold: 'not cached: computed when needed',
}

/** In one line, as beside a pointer. */
export const warmthWords = (kv: NodeKv) => `KV ${WARMTH[kv.state]}${kv.pinned ? ' (pinned)' : ''}`

/** What is worth hearing of a row; nothing where there is no KV to speak of. */
export function warmthSpoken(kv: NodeKv | undefined): string | undefined {
  if (kv?.state !== 'hot' && kv?.state !== 'host') return undefined
  return `KV ${kv.state === 'hot' ? 'cached' : 'cached in host memory'}${kv.pinned ? ', pinned' : ''}`
}
