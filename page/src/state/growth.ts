/** The branches of an open loom that grow, and those that ended in the last call. */
import { batch, signal } from '@preact/signals'
import type { BranchEvent, TokenEvent } from '../api/feed'
import { Lane } from '../model/lane'
import type { LoomTree } from '../model/tree'

const PAINT_MS = 34 // at most 30 times per second
// The layout of a text takes longer the longer it is: it is painted less often.
const CHARACTERS_PER_MS = 1000

export class Growth {
  /** By node: branches that grow, and ended ones of a call that still grows others. */
  readonly lanes = signal<ReadonlyMap<number, Lane>>(new Map())
  /** A call without branches so far; the page shows empty lanes for it. */
  readonly requested = signal<{ parent: number; n: number } | null>(null)
  private readonly jobs = new Map<string, Map<number, Lane>>()
  /** Jobs whose end the feed has reported; the reply to their call may arrive later. */
  private readonly ended = new Set<string>()
  private readonly dirty = new Set<Lane>()
  private isPainting = false

  constructor(private readonly tree: LoomTree) {}

  get isGrowing(): boolean {
    return [...this.lanes.value.values()].some((lane) => !lane.isOver)
  }

  /** Return true if a node or one of its children grows: its text must not change until then. */
  growsAt(number: number): boolean {
    const lanes = [...this.lanes.peek().values()]
    return lanes.some((lane) => !lane.isOver && (lane.node === number || lane.parent === number))
  }

  hasEnded(job: string): boolean {
    return this.ended.has(job)
  }

  /** Add lanes and nodes for a job's branches. Known branches do not change. */
  start(job: string, branches: readonly BranchEvent[]): void {
    let known = this.jobs.get(job)
    if (!known) {
      if (!this.isGrowing) this.dropFinished()
      known = new Map()
      this.jobs.set(job, known)
    }
    const lanes = new Map(this.lanes.peek())
    for (const branch of branches) {
      if (known.has(branch.branch)) continue
      const lane = new Lane(job, branch.branch, branch.node, branch.parent, branch.model ?? null)
      known.set(branch.branch, lane)
      lanes.set(branch.node, lane)
      if (!this.tree.get(branch.node)) this.tree.put([provisional(branch)])
    }
    this.lanes.value = lanes
  }

  /** Remove the lanes of earlier calls. Failed lanes remain: they are all that is left of their branch. */
  private dropFinished(): void {
    this.lanes.value = new Map([...this.lanes.peek()].filter(([, lane]) => isFailed(lane)))
  }

  lane(job: string, branch: number): Lane | undefined {
    return this.jobs.get(job)?.get(branch)
  }

  lanesOf(job: string): Lane[] {
    return [...(this.jobs.get(job)?.values() ?? [])]
  }

  addTokens(job: string, tokens: readonly TokenEvent[]): void {
    for (const [branch, added] of Map.groupBy(tokens, (each) => each[0])) {
      const lane = this.lane(job, branch)
      if (!lane || lane.isOver) continue
      lane.take(added)
      this.paint(lane)
    }
  }

  endLane(lane: Lane, finish: string | null): void {
    if (lane.isOver) return
    lane.finish = finish
    lane.state = finish === 'error' ? 'failed' : 'done'
    const node = this.tree.get(lane.node)
    if (node) {
      node.growing = false
      node.text = lane.text
      node.mean_p = lane.meanP ?? node.mean_p
    }
    this.paint(lane)
  }

  failLane(lane: Lane, message: string): void {
    lane.error = message
    lane.state = 'failed'
    this.paint(lane)
  }

  /** End a job. Its lanes stay until the next call. */
  endJob(job: string): void {
    this.jobs.delete(job)
    this.ended.add(job)
    this.lanes.value = new Map(this.lanes.peek())
  }

  /** End the jobs that the server no longer runs. Returns the lanes that were growing. */
  endMissingJobs(running: ReadonlySet<string>): Lane[] {
    const interrupted: Lane[] = []
    for (const [job, lanes] of [...this.jobs]) {
      if (running.has(job)) continue
      interrupted.push(...[...lanes.values()].filter((lane) => !lane.isOver))
      for (const lane of lanes.values()) this.endLane(lane, lane.finish)
      this.jobs.delete(job)
    }
    return interrupted
  }

  // Failed lanes

  /** Failed lanes below a node; null: all of them. */
  failedLanes(parent: number | null = null): Lane[] {
    const all = [...this.lanes.peek().values()].filter(isFailed)
    return parent === null ? all : all.filter((lane) => lane.parent === parent)
  }

  dismiss(dismissed: readonly Lane[]): void {
    this.lanes.value = new Map([...this.lanes.peek()].filter(([, lane]) => !dismissed.includes(lane)))
  }

  /** Dismiss lanes while `call` requests others in their place; restore them if it returns undefined. */
  async replace<Result>(
    dismissed: readonly Lane[],
    call: () => Promise<Result | undefined>,
  ): Promise<boolean> {
    this.dismiss(dismissed)
    const isReplaced = (await call()) !== undefined
    if (!isReplaced) {
      const restored = dismissed.map((lane) => [lane.node, lane] as const)
      this.lanes.value = new Map([...restored, ...this.lanes.peek()])
    }
    return isReplaced
  }

  // Painting

  /** Update the nodes of changed lanes, at most once per `PAINT_MS`. */
  paint(lane: Lane): void {
    this.dirty.add(lane)
    if (this.isPainting) return
    this.isPainting = true
    setTimeout(
      () => {
        this.isPainting = false
        batch(() => this.paintDirty())
      },
      PAINT_MS + lane.text.length / CHARACTERS_PER_MS,
    )
  }

  private paintDirty(): void {
    for (const lane of this.dirty) {
      const node = this.tree.get(lane.node)
      if (node && !lane.isOver) {
        node.text = lane.text
        node.n_tokens = lane.nTokens
        node.mean_p = lane.meanP
      }
      lane.version.value += 1
    }
    this.dirty.clear()
  }
}

const isFailed = (lane: Lane) => lane.state === 'failed'

/** A node for a branch that the server has not saved yet. */
const provisional = (branch: BranchEvent) => ({
  node: branch.node,
  id: branch.id,
  parent: branch.parent,
  author: null,
  model: branch.model ?? null,
  children: [],
  n_below: 0,
  text: branch.text ?? '',
  n_tokens: branch.n_tokens ?? 0,
  mean_p: null,
  mean_logprob: null,
  finish_reason: branch.finish_reason ?? null,
  ended: false,
  growing: branch.finish_reason == null,
})
