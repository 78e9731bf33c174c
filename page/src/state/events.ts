/** Apply the events of a loom's feed: jobs, tokens, ends of branches, scores and errors. */
import { signal } from '@preact/signals'
import { ApiError } from '../api/client'
import type { BranchEvent, FeedEvents } from '../api/feed'
import type { Lane } from '../model/lane'
import type { LoomTree } from '../model/tree'
import { plural } from '../model/words'
import type { Growth } from './growth'
import type { Position } from './position'
import type { Searches } from './searches'
import type { Sync } from './sync'
import { failed, toast } from './toasts'

export class LoomEvents {
  /** The error of the last call that failed, and the nodes that it grew from. */
  readonly lastError = signal<{ error: ApiError; nodes: number[] } | null>(null)

  constructor(
    private readonly tree: LoomTree,
    private readonly position: Position,
    private readonly growth: Growth,
    private readonly searches: Searches,
    private readonly sync: Sync,
  ) {}

  /** Events whose nodes must be loaded first. */
  readonly handlers = {
    snapshot: this.later<'snapshot'>((data) => this.onSnapshot(data)),
    job: this.later<'job'>((data) => this.startJob(data.job, data.branches, data.asked ?? undefined)),
    tok: this.later<'tok'>((data) => this.growth.addTokens(data.job, data.t)),
    branch: this.later<'branch'>((data) => this.onBranch(data)),
    score: this.later<'score'>((data) => this.onScore(data)),
    change: this.later<'change'>((data) => this.sync.applyEvent(data)),
    error: this.later<'error'>((data) => this.onError(data)),
    done: this.later<'done'>((data) => this.onDone(data)),
  }

  private later<Name extends keyof FeedEvents>(handle: (data: FeedEvents[Name]) => void) {
    return (data: FeedEvents[Name]) => this.sync.whenLoaded(() => handle(data))
  }

  /** Add a job's branches to the tree. Known branches do not change. request: of a search. */
  startJob(job: string, branches: readonly BranchEvent[], request?: Record<string, unknown>): void {
    this.growth.requested.value = null
    if (this.growth.hasEnded(job)) return
    if (request !== undefined) this.searches.note(job, request)
    this.growth.start(job, branches)
    const numbers = branches.map((each) => each.node)
    this.searches.change(job, (run) => ({ nodes: [...new Set([...run.nodes, ...numbers])] }))
  }

  private onSnapshot(data: FeedEvents['snapshot']): void {
    const running = new Set(data.jobs.map((each) => each.id))
    const interrupted = this.growth.endMissingJobs(running)
    for (const run of this.searches.runs.peek()) {
      if (run.status === 'running' && !running.has(run.job)) this.searches.reread(run.job)
    }
    if (data.rev !== this.tree.rev || interrupted.length)
      this.sync.refresh().then(() => this.reportInterrupted(interrupted), failed)
    for (const job of data.jobs) this.restoreJob(job)
  }

  private restoreJob(job: FeedEvents['snapshot']['jobs'][number]): void {
    this.startJob(job.id, job.texts, job.asked ?? undefined)
    if (job.kind === 'run') this.searches.adopt(job)
    for (const branch of job.texts) {
      const lane = this.growth.lane(job.id, branch.branch)
      if (!lane) continue
      lane.text = branch.text ?? ''
      lane.nTokens = branch.n_tokens ?? 0
      if (branch.finish_reason) this.growth.endLane(lane, branch.finish_reason)
      else this.growth.paint(lane)
    }
  }

  /** Show how branches ended while the feed was disconnected. */
  private reportInterrupted(lanes: readonly Lane[]): void {
    for (const lane of lanes) {
      lane.finish = this.tree.get(lane.node)?.finish_reason ?? lane.finish
      this.growth.paint(lane)
    }
    const n = lanes.filter((lane) => lane.finish === 'interrupted').length
    if (n)
      toast(`The server was stopped: ${plural(n, 'branch was', 'branches were')} interrupted.`, {
        detail: 'Their text is saved; you can continue them.',
      })
  }

  private onBranch(data: FeedEvents['branch']): void {
    const lane = this.growth.lane(data.job, data.branch)
    if (!lane) return
    lane.kept = data.kept
    lane.nTokens = data.n_tokens
    this.growth.endLane(lane, data.finish_reason)
    const node = this.tree.get(data.node)
    if (!node) return
    if (!data.kept) {
      this.tree.remove([data.node])
      this.position.dropRemoved()
      return
    }
    node.finish_reason = data.finish_reason
    node.stop_string = data.stop_string
    node.ended = data.ended
    node.n_tokens = data.n_tokens
    this.tree.touch()
  }

  private onScore(data: FeedEvents['score']): void {
    this.searches.change(data.job, (run) => ({
      rounds: [...run.rounds.filter((each) => each.round < data.round), data],
    }))
    for (const candidate of data.candidates) {
      const node = this.tree.get(candidate.node)
      if (node && candidate.score !== undefined) node.score = candidate.score
    }
    this.tree.touch()
  }

  private onError(data: FeedEvents['error']): void {
    const lanes = this.growth.lanesOf(data.job)
    for (const lane of lanes)
      if (!lane.isOver || lane.state === 'failed') this.growth.failLane(lane, data.message)
    this.searches.change(data.job, () => ({ error: data.message }))
    this.lastError.value = {
      error: new ApiError(500, data.code, data.message, data.hint, null, data.details, data.request_id),
      nodes: [...new Set(lanes.map((lane) => lane.parent))],
    }
  }

  private onDone(data: FeedEvents['done']): void {
    const lanes = this.growth.lanesOf(data.job)
    for (const lane of lanes) this.growth.endLane(lane, lane.finish)
    const full = lanes.find((lane) => lane.finish === 'context')
    if (full) this.lastError.value = { error: this.contextFull(full.node), nodes: [full.parent] }
    this.searches.change(data.job, () => ({ status: data.status, result: data.result ?? null }))
    this.growth.endJob(data.job)
    this.tree.touch()
  }

  /** The error of a branch that filled the context; a prompt that is too long has the same code. */
  private contextFull(node: number): ApiError {
    const n = this.tree.path(node).reduce((sum, each) => sum + this.tree.get(each)!.n_tokens, 0)
    const message = 'the branch has reached the end of the context'
    return new ApiError(400, 'context_length_exceeded', message, '', null, { n_prompt_tokens: n })
  }
}
