/** Calls that change the open loom, one after the other, and how their errors are shown. */
import { ApiError, type Changed } from '../../api/client'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { failed, toast } from '../toasts'

/** Run an action on the open loom. An error is shown, and the result is undefined. */
export async function withLoom<Result>(
  work: (loom: OpenLoom) => Promise<Result>,
  loom = open.peek(),
): Promise<Result | undefined> {
  if (!loom) return undefined
  try {
    return await work(loom)
  } catch (error) {
    if (!isUnanswered(error)) failed(error)
    return undefined
  }
}

/** Show that nothing was changed because the server does not answer. Returns false for any other error. */
export function isUnanswered(error: unknown): boolean {
  if (!(error instanceof ApiError && error.isAway)) return false
  toast('The server does not answer.', { detail: 'Nothing was changed. Try again when the server is back.' })
  return true
}

/** Make a change. The tree shows it from the reply, before the feed reports it. */
export function change(work: (loom: OpenLoom) => Promise<Changed>): Promise<Changed | undefined> {
  return withLoom(async (loom) => {
    const changed = await enqueue(() => work(loom))
    loom.sync.applyReply(changed)
    return changed
  })
}

let turn: Promise<unknown> = Promise.resolve()

/** Run changes one after the other, in the order of their calls: an Undo reverts the change before it. */
export function enqueue<Result>(call: () => Promise<Result>): Promise<Result> {
  const result = turn.then(call)
  turn = result.catch(() => {})
  return result
}

/** Show that a change must wait for a branch. Returns null if nothing must wait. */
export function mustWait(isGrowing: boolean | undefined, what: string): Promise<undefined> | null {
  if (!isGrowing) return null
  toast(`The node is still growing: stop it, or wait, ${what}.`)
  return Promise.resolve(undefined)
}

/** Go to the node that a change has added. */
export function navigateToAdded(changed: Changed | undefined): number | null {
  const added = changed?.added?.[changed.added.length - 1]
  if (!added) return null
  open.peek()?.navigate(added.node)
  return added.node
}
