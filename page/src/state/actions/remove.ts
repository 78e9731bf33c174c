/** Remove nodes. */
import { api, type Changed } from '../../api/client'
import { ROOT } from '../../model/tree'
import { formatCount, plural } from '../../model/words'
import { call } from '../handlers'
import type { OpenLoom } from '../loom'
import { toast } from '../toasts'
import { enqueue, withLoom } from './change'
import { undoable } from './history'
import { confirm } from './question'

/** Above so many nodes a removal asks before, not after. */
const ASKS_ABOVE = 20

export type What = 'node' | 'children' | 'siblings' | 'others'

/** Numbers that a removal takes, the tops only. */
export function removed(loom: OpenLoom, node: number, what: What): number[] {
  const { tree } = loom
  if (what === 'node') return [node]
  if (what === 'children') return tree.children(node)
  if (what === 'siblings') return tree.siblings(node).filter((each) => each !== node)
  const path = new Set(tree.path(node))
  return [...path].flatMap((each) =>
    each === node ? [] : tree.children(each).filter((child) => !path.has(child)),
  )
}

export async function remove(node: number, what: What = 'node'): Promise<void> {
  await withLoom(async (loom) => {
    if (what === 'node' && node === ROOT) {
      toast('The prompt cannot be removed; its loom can.', {
        detail: 'To remove the loom, open Loom and choose “Remove this loom”.',
      })
      return
    }
    const tops = removed(loom, node, what)
    const n = tops.reduce((sum, each) => sum + 1 + loom.tree.below(each), 0)
    if (!n) return
    if (
      n > ASKS_ABOVE &&
      !(await confirm(`Remove ${formatCount(n)} nodes?`, 'Undo restores them.', 'Remove'))
    )
      return
    await stopped(loom, tops)
    if (!loom.tree.get(node)) return // it had nothing yet
    const next = nodeAfter(loom, node, what)
    const fold = call('removing', tops)
    loom.position.next = next // the event may arrive before the reply
    const changed = await taken(loom, () => api.remove(loom.id, node, what), fold)
    if (next !== null) loom.navigate(next)
    showRemoved(n, changed)
  })
}

/** So many nodes, and what stands below them, are removed by one call. */
export const REMOVED_AT_ONCE = 1000

/** Remove several nodes, as one change that one Undo brings back. */
export async function removeMany(nodes: readonly number[]): Promise<void> {
  await withLoom(async (loom) => {
    const { tree } = loom
    const going = new Set(nodes.filter((each) => each !== ROOT && tree.get(each)))
    const tops = [...going].filter((each) => !tree.path(each).some((up) => up !== each && going.has(up)))
    if (!tops.length) return
    if (tops.length > REMOVED_AT_ONCE) {
      toast(
        `At most ${formatCount(REMOVED_AT_ONCE)} nodes can be removed at once; ${formatCount(tops.length)} are selected.`,
      )
      return
    }
    const n = tops.reduce((sum, each) => sum + 1 + tree.below(each), 0)
    if (
      n > ASKS_ABOVE &&
      !(await confirm(`Remove ${formatCount(n)} nodes?`, 'Undo restores them.', 'Remove'))
    )
      return
    await stopped(loom, tops)
    const [first, ...others] = tops.filter((each) => tree.get(each))
    if (first === undefined) return // none had anything yet
    const stays = tree
      .path(loom.current.peek())
      .findLast((_, i, path) => path.slice(0, i + 1).every((up) => !going.has(up)))
    const fold = call('removing', tops)
    loom.position.next = stays ?? null
    const changed = await taken(loom, () => api.remove(loom.id, first, 'node', others), fold)
    if (stays !== undefined) loom.navigate(stays)
    loom.selected.value = new Set()
    showRemoved(n, changed)
  })
}

const STOPS_MS = 2000

/** End what grows in what is about to go: what it has is kept then, and Undo brings it back. */
async function stopped(loom: OpenLoom, tops: readonly number[]): Promise<void> {
  const lanes = [...loom.lanes.peek().values()].filter(
    (lane) => !lane.isOver && tops.some((top) => loom.tree.isBelow(lane.node, top)),
  )
  const byJob = Map.groupBy(lanes, (lane) => lane.job)
  await Promise.all(
    [...byJob].map(([job, ended]) =>
      api.cancel(
        job,
        ended.map((lane) => lane.branch),
      ),
    ),
  )
  // A model that runs a long step stops after it; the removal does not wait for that.
  const until = performance.now() + STOPS_MS
  while (lanes.some((lane) => !lane.isOver) && performance.now() < until)
    await new Promise((resolve) => setTimeout(resolve, 25))
}

function showRemoved(n: number, changed: Changed): void {
  if (changed.removed?.length) undoable(`Removed ${plural(n, 'node')}`, changed.rev)
  else toast('Stopped and removed the new branches.')
}

/** Make a removal, and show it; the loom's `next` says where one stands then. */
async function taken(loom: OpenLoom, call: () => Promise<Changed>, fold?: () => void): Promise<Changed> {
  try {
    const changed = await enqueue(call)
    fold?.()
    loom.sync.applyReply(changed)
    return changed
  } finally {
    loom.position.next = null
  }
}

/** The current node after a removal: the next sibling, else the previous one, else the parent. */
function nodeAfter(loom: OpenLoom, node: number, what: What): number | null {
  const current = loom.current.peek()
  if (!removed(loom, node, what).some((each) => loom.tree.isBelow(current, each))) return null
  if (what !== 'node') return node
  const siblings = loom.tree.siblings(node)
  const at = siblings.indexOf(node)
  return siblings[at + 1] ?? siblings[at - 1] ?? loom.tree.parent(node)
}
