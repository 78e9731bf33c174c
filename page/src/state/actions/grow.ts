/** Grow, continue, search, retry and stop branches. */
import { effect, untracked } from '@preact/signals'
import { ApiError, api, type GrowRequest, type RunRequest, type Schemas } from '../../api/client'
import type { Lane } from '../../model/lane'
import { plural } from '../../model/words'
import { showGrowthError } from '../growthErrors'
import type { OpenLoom } from '../loom'
import { cannotGrow, model, open } from '../session'
import {
  blocked,
  discardNextCall,
  growRequest,
  limits,
  settings,
  showFieldError,
  TO_THE_END,
} from '../settings'
import { failed, toast } from '../toasts'
import { inspect } from '../view'
import { isUnanswered, mustWait, withLoom } from './change'

/**
 * Grow, unless the loom is read-only or a setting is invalid. An obstacle is shown with its remedies, an
 * invalid setting at its field.
 */
async function growing(
  call: (loom: OpenLoom, more: GrowRequest) => Promise<Schemas['JobReply']>,
  more: GrowRequest,
): Promise<Schemas['JobReply'] | undefined> {
  const loom = open.peek()
  if (!loom) return undefined
  if (cannotGrow.peek()) {
    toast(cannotGrow.peek()!)
    return undefined
  }
  const wrong = blocked.peek()
  if (wrong !== null) {
    inspect('generate')
    toast(wrong, { kind: 'error' })
    return undefined
  }
  try {
    const job = await call(loom, { ...growRequest(), ...more })
    loom.events.startJob(job.job, job.branches ?? [])
    discardNextCall()
    return job
  } catch (error) {
    if (isUnanswered(error)) return undefined
    if (showFieldError(error)) inspect('generate')
    const resend = (other: GrowRequest) => open.peek() === loom && growing(call, { ...more, ...other })
    if (!(error instanceof ApiError && showGrowthError(error, resend))) failed(error)
    return undefined
  }
}

// An error during growth is shown like an error of the call.
effect(() => {
  const failure = open.value?.events.lastError.value
  if (!failure) return
  const loom = open.peek()!
  const resend = async (other: GrowRequest) => {
    const failed = loom.growth.failedLanes().filter((lane) => failure.nodes.includes(lane.parent))
    await loom.growth.replace(failed, () => growMany(failure.nodes, other))
  }
  untracked(() => showGrowthError(failure.error, resend) || failed(failure.error))
})

/** Continue a node that has ended: without a minimum most branches would end at once again. */
const pastEnd = (loom: OpenLoom, node: number): GrowRequest =>
  loom.tree.get(node)?.ended ? { force: true, ...(settings.peek().constraint ? {} : { min_tokens: 1 }) } : {}

/** Grow n children of a node. A single answer of a chat is gone to, as it comes. */
export const grow = (node: number, more: GrowRequest = {}) =>
  mustWait(open.peek()?.tree.get(node)?.growing, 'to grow below it') ?? growAndFollow(node, more)

async function growAndFollow(node: number, more: GrowRequest): Promise<Schemas['JobReply'] | undefined> {
  const loom = open.peek()
  const from = loom?.current.peek()
  const job = await growChildren(node, more)
  const [branch, ...others] = job?.branches ?? []
  if (!loom?.isChat || !branch || others.length || loom.current.peek() !== from) return job
  if (from === node || loom.tree.parent(from!) === node) {
    const draft = loom.drafts.open
    loom.navigate(branch.node)
    if (draft?.kind === 'child' && draft.node === from) loom.drafts.move(draft, branch.node)
  }
  return job
}

/** Grow one branch until it ends, and show it as it comes. */
export async function continueToEnd(node: number): Promise<void> {
  const loom = open.peek()
  const maxTokens = Math.min(TO_THE_END, limits.peek()?.tokens ?? TO_THE_END)
  const job = await grow(node, { n: 1, max_tokens: maxTokens })
  const branch = job?.branches?.[0]
  if (branch && loom?.current.peek() === node) loom.navigate(branch.node)
}

/** Grow n children of a node, and stay where one is. */
export const growChildren = (node: number, more: GrowRequest) =>
  growing(async (loom, what) => {
    loom.growth.requested.value = { parent: node, n: (what.n ?? 1) * (what.models?.length || 1) }
    try {
      return await api.grow(loom.id, node, { ...pastEnd(loom, node), ...what })
    } finally {
      loom.growth.requested.value = null
    }
  }, more)

/** Grow n children of each of several nodes, in one batch. null: of all leaves that have not ended. */
export const growMany = (nodes: number[] | null, more: GrowRequest = {}) =>
  growing((loom, what) => api.growMany(loom.id, { ...what, nodes }), more).then((job) => {
    if (job?.skipped?.length)
      toast(`${plural(job.skipped.length, 'node')} had already ended and did not grow.`)
    return job
  })

/** Search for an answer below a node; the inspector shows its rounds. Raises: ApiError. */
export async function search(request: RunRequest): Promise<void> {
  const loom = open.peek()
  if (!loom) return
  const job = await api.run(loom.id, request)
  loom.events.startJob(job.job, job.branches ?? [], { ...request })
  inspect('run')
}

/** Grow as many branches as have failed. Nodes that failed branches have left stay in the tree. */
export async function retry(lanes: readonly Lane[]): Promise<void> {
  const loom = open.peek()
  for (const [parent, below] of Map.groupBy(lanes, (lane) => lane.parent))
    for (const [name, failed] of Map.groupBy(below, (lane) => lane.model ?? model.peek()?.id)) {
      const more = { n: failed.length, ...(name === undefined ? {} : { models: [name] }) }
      if (!(await loom?.growth.replace(failed, () => grow(parent, more)))) return
    }
}

/** End one branch; what it has is kept. */
export const stopBranch = (node: number) =>
  withLoom(async (loom) => {
    const lane = loom.lanes.peek().get(node)
    if (lane && !lane.isOver) await api.cancel(lane.job, [lane.branch])
  })

/** End everything that grows in the open loom. */
export const stopAll = () =>
  withLoom(async (loom) => {
    const jobs = new Set(
      [...loom.lanes.peek().values()].filter((lane) => !lane.isOver).map((lane) => lane.job),
    )
    for (const run of loom.runs.peek()) if (run.status === 'running') jobs.add(run.job)
    await Promise.all([...jobs].map((job) => api.cancel(job)))
  })
