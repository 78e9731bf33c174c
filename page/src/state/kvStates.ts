/** The KV state of the visible rows: read after the tree has stopped changing, never during growth. */
import { effect, signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../api/client'
import { kv, kvVersion } from './kvUsage'
import type { OpenLoom } from './loom'
import { isAway, model, open } from './session'
import { failed } from './toasts'
import { treeView } from './view'

const REST_MS = 300
const EVERY_MS = 1000
const MAX_NODES = 200 // that one request may name

/** By node: the KV state, as far as it is known. */
export const kvStates = signal<ReadonlyMap<number, Schemas['NodeKv']>>(new Map())
const inView = signal<readonly number[]>([])

/** Set the rows that are visible now. */
export function setVisibleNodes(nodes: readonly number[]): void {
  if (nodes.join() !== inView.peek().join()) inView.value = nodes
}

let before: readonly unknown[] = []
/** The nodes requested since the last change. */
let requested = new Set<number>()
let requestedAt = 0

effect(() => {
  const loom = open.value
  const kind = model.value?.abilities?.kv
  // Only who follows the loom knows that the server has it still.
  const isThere = loom !== null && !loom.gone.value && loom.feed.isConnected.value && !isAway.value
  const isKnown = isThere && kind !== undefined && kind !== 'hidden'
  const isGrowing = loom?.isGrowing
  const now = [loom, isKnown, isGrowing, kv.value, kvVersion.value, loom?.tree.version.value]
  if (now.some((each, i) => each !== before[i])) requested = new Set()
  if ((loom !== before[0] || !isKnown) && kvStates.peek().size) kvStates.value = new Map()
  before = now
  const isVisible = treeView.value === 'outline'
  const wanted = inView.value.filter((each) => !requested.has(each)).slice(0, MAX_NODES)
  if (!loom || !isKnown || isGrowing || !isVisible || !wanted.length) return
  const ask = () => {
    if (document.hidden) return
    document.removeEventListener('visibilitychange', ask)
    void read(loom, wanted)
  }
  const timer = setTimeout(
    () => {
      document.addEventListener('visibilitychange', ask)
      ask()
    },
    Math.max(REST_MS, requestedAt + EVERY_MS - Date.now()),
  )
  return () => {
    clearTimeout(timer)
    document.removeEventListener('visibilitychange', ask)
  }
})

async function read(loom: OpenLoom, nodes: readonly number[]): Promise<void> {
  requestedAt = Date.now()
  const round = requested
  for (const node of nodes) round.add(node)
  try {
    const reply = await api.nodes(loom.id, { nodes: [...nodes], fields: ['kv'], limit: MAX_NODES })
    if (requested !== round) return // something has changed: all rows are requested again
    const known = new Map(kvStates.peek())
    for (const node of nodes) known.delete(node)
    for (const node of reply.data) if (node.kv) known.set(node.node, node.kv)
    kvStates.value = known
  } catch (error) {
    // The next change requests it again; other parts of the page report a missing server or loom.
    if (!(error instanceof ApiError)) failed(error)
  }
}
