/** Texts for the state of the KV of a node's path. */
import type { Schemas } from '../api/client'

type NodeKv = Schemas['NodeKv']

export const KV_STATE_TEXTS: Record<NodeKv['state'], string> = {
  hot: 'cached',
  host: 'in host memory, copied back when needed',
  partly: 'partly cached',
  cold: 'not cached, recomputed when needed',
}

/** One line, for a tooltip. */
export const kvStateText = (kv: NodeKv) => `KV ${KV_STATE_TEXTS[kv.state]}${kv.pinned ? ' (pinned)' : ''}`

/** The text for screen readers; undefined: the row has no KV. */
export function spokenKvState(kv: NodeKv | undefined): string | undefined {
  if (kv?.state !== 'hot' && kv?.state !== 'host') return undefined
  return `KV ${kv.state === 'hot' ? 'cached' : 'in host memory'}${kv.pinned ? ', pinned' : ''}`
}
