/** Where the KV of the rows in view is: asked for when the tree has come to rest, never while it grows. */
import { effect, signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../api/client'
import { kv, kvTurn } from './gauge'
import type { OpenLoom } from './loom'
import { isAway, model, open } from './session'
import { failed } from './toasts'
import { treeView } from './view'

const REST_MS = 300
const EVERY_MS = 1000
const MOST = 200 // that one request may name

/** What is known of the open loom's nodes, by number. */
export const warmth = signal<ReadonlyMap<number, Schemas['NodeKv']>>(new Map())
const inView = signal<readonly number[]>([])

/** These rows can be seen now. */
export function lookAt(nodes: readonly number[]): void {
  if (nodes.join() !== inView.peek().join()) inView.value = nodes
}

let before: readonly unknown[] = []
/** The nodes that have been asked for since something changed. */
let asked = new Set<number>()
let askedAt = 0

effect(() => {
  const loom = open.value
  const kind = model.value?.abilities?.kv
  // Only who follows the loom knows that the server has it still.
  const isThere = loom !== null && !loom.gone.value && loom.feed.isConnected.value && !isAway.value
  const canTell = isThere && kind !== undefined && kind !== 'hidden'
  const isGrowing = loom?.isGrowing
  const now = [loom, canTell, isGrowing, kv.value, kvTurn.value, loom?.tree.version.value]
  if (now.some((each, i) => each !== before[i])) asked = new Set()
  if ((loom !== before[0] || !canTell) && warmth.peek().size) warmth.value = new Map()
  before = now
  const isSeen = treeView.value === 'outline'
  const wanted = inView.value.filter((each) => !asked.has(each)).slice(0, MOST)
  if (!loom || !canTell || isGrowing || !isSeen || !wanted.length) return
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
    Math.max(REST_MS, askedAt + EVERY_MS - Date.now()),
  )
  return () => {
    clearTimeout(timer)
    document.removeEventListener('visibilitychange', ask)
  }
})

async function read(loom: OpenLoom, nodes: readonly number[]): Promise<void> {
  askedAt = Date.now()
  const round = asked
  for (const each of nodes) round.add(each)
  try {
    const told = await api.nodes(loom.id, { nodes: [...nodes], fields: ['kv'], limit: MOST })
    if (asked !== round) return // something has changed meanwhile: all of it is asked for again
    const known = new Map(warmth.peek())
    for (const each of nodes) known.delete(each)
    for (const each of told.data) if (each.kv) known.set(each.node, each.kv)
    warmth.value = known
  } catch (error) {
    // It is asked for again when something changes; a server or a loom that is gone is told elsewhere.
    if (!(error instanceof ApiError)) failed(error)
  }
}
