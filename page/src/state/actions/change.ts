/** Calls that change the open loom, one after the other, and how their errors are shown. */
import { ApiError, type Changed } from '../../api/client'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { failed, toast } from '../toasts'

/** Do something to the open loom; what goes wrong is told. Returns undefined then. */
export async function on<Result>(
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

/** Tell that nothing was done because the server does not answer. Returns false for any other error. */
export function isUnanswered(error: unknown): boolean {
  if (!(error instanceof ApiError && error.isAway)) return false
  toast('The server does not answer.', { detail: 'Nothing was changed. Try again when the server is back.' })
  return true
}

/** Make a change; it is shown from the call's own answer, before the feed tells it. */
export function change(work: (loom: OpenLoom) => Promise<Changed>): Promise<Changed | undefined> {
  return on(async (loom) => {
    const made = await inTurn(() => work(loom))
    loom.sync.applyReply(made)
    return made
  })
}

let turn: Promise<unknown> = Promise.resolve()

/** One change after the other, as they were asked for: an Undo is of what came before it. */
export function inTurn<Made>(call: () => Promise<Made>): Promise<Made> {
  const made = turn.then(call)
  turn = made.catch(() => {})
  return made
}

/** What must wait for a branch is told, not asked for. Returns null where nothing must wait. */
export function waits(isGrowing: boolean | undefined, what: string): Promise<undefined> | null {
  if (!isGrowing) return null
  toast(`It is still growing: stop it, or wait, ${what}.`)
  return Promise.resolve(undefined)
}

/** Go to the node that a change has added. */
export function follow(made: Changed | undefined): number | null {
  const added = made?.added?.[made.added.length - 1]
  if (!added) return null
  open.peek()?.go(added.node)
  return added.node
}
