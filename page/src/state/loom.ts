/** An open loom: its tree, where one stands in it, what grows in it, and what was looked at. */
import { batch, computed, effect, signal } from '@preact/signals'
import { ApiError, api, type Loom, type Node, type Schemas } from '../api/client'
import { type BranchEvent, Feed, type FeedEvents, type FeedHandlers } from '../api/feed'
import { Lane } from '../model/lane'
import type { RunResult } from '../model/run'
import { sortValue } from '../model/sibling_order'
import { LoomTree, ROOT } from '../model/tree'
import { plural } from '../model/words'
import { Drafts } from './drafts'
import { Searches } from './searches'
import { read, write } from './storage'
import { failed, overtaken, toast } from './toasts'
import { TokenCache } from './tokens'
import { siblingOrder } from './view'

const PAGE = 1000 // nodes a request
const PAINT_MS = 34 // at most 30 a second
// A long text is laid out as a whole: it is painted as much less often as that takes longer.
const LETTERS_A_MS = 1000

/** What this browser remembers of a loom. */
interface Remembered {
  current: number
  collapsed: number[]
  hoisted: number[]
  visited: number[]
  lastChild: Record<string, number>
}

type Change = Pick<Schemas['Changed'], 'rev' | 'added' | 'changed' | 'removed'> &
  Partial<FeedEvents['change']>

export class OpenLoom {
  readonly id: string
  readonly tree = new LoomTree()
  readonly info
  /** loading: how many nodes of how many have come; null once all are there. */
  readonly loading = signal<{ done: number; total: number } | null>({ done: 0, total: 1 })
  readonly current = signal(ROOT)
  /** The place before the last jump. */
  previous = ROOT
  /** Where to stand when the current node goes, as long as its removal is under way. */
  next: number | null = null
  /** The node that went while one stood there, and where one has stood since. */
  private left: { node: number; at: number } | null = null
  /** The path that is shown: it goes on below the current node along last visited children. */
  readonly collapsed = signal<ReadonlySet<number>>(new Set())
  /** Nodes that were made the root for a while, the innermost last. */
  readonly hoisted = signal<readonly number[]>([])
  readonly selected = signal<ReadonlySet<number>>(new Set())
  readonly bookmarks = computed(() => {
    this.tree.version.value
    return [...this.tree.preorder()].filter((each) => this.tree.get(each)?.bookmark != null)
  })
  /** Branches that grow, and those that ended in calls of which one still grows. By node. */
  readonly lanes = signal<ReadonlyMap<number, Lane>>(new Map())
  /** A call that was sent and has no branches yet: its lanes stand there already. */
  readonly asking = signal<{ parent: number; n: number } | null>(null)
  readonly drafts: Drafts
  private readonly searches = new Searches()
  readonly runs = this.searches.runs
  readonly shownRun = this.searches.shownRun
  readonly shownRound = this.searches.shownRound
  readonly run = this.searches.run
  readonly searched = this.searches.searched
  readonly pruned = this.searches.pruned
  /** It went while it was open, or another server answers now: what is shown can still be read. */
  readonly gone = signal<'removed' | 'unknown' | null>(null)
  /** What a call failed with last, and which nodes it grew. */
  readonly lastError = signal<{ error: ApiError; nodes: number[] } | null>(null)
  readonly visited = new Set<number>()
  readonly visitedVersion = signal(0)
  private readonly lastChild = new Map<number, number>()
  readonly tokens: TokenCache
  /** Rises when a node says something else in its place, or stands elsewhere: tokens weigh other than before. */
  readonly weighed = signal(0)
  private readonly jobs = new Map<string, { branches: Map<number, Lane> }>()
  /** Jobs whose end the feed has told: the answer to their call may come later. */
  private readonly ended = new Set<string>()
  readonly feed: Feed
  private readonly dirty = new Set<Lane>()
  private painting = false
  private isLoaded = false
  /** The last revision that the feed has told. */
  private told = 0
  private early: (() => void)[] = []
  private readonly stopSorting: () => void

  constructor(info: Loom, wanted: number | null = null) {
    this.id = info.id
    this.info = signal(info)
    this.drafts = new Drafts(this.id)
    this.tokens = new TokenCache(this.id)
    const kept = read<Remembered>(`loom.${this.id}`, {
      current: ROOT,
      collapsed: [],
      hoisted: [],
      visited: [],
      lastChild: {},
    })
    this.current.value = wanted ?? kept.current
    this.collapsed.value = new Set(kept.collapsed)
    this.hoisted.value = kept.hoisted
    for (const each of kept.visited) this.visited.add(each)
    for (const [parent, child] of Object.entries(kept.lastChild)) this.lastChild.set(Number(parent), child)
    this.feed = new Feed(this.id, this.handlers())
    addEventListener('pagehide', this.keep)
    this.stopSorting = effect(() => this.tree.sortBy(sortValue(siblingOrder.value)))
  }

  close(): void {
    this.feed.close()
    this.stopSorting()
    this.drafts.end()
    removeEventListener('pagehide', this.keep)
    this.keep()
  }

  /** The prompt and the messages are formatted by a chat template. */
  get isChat(): boolean {
    return this.info.value.chat_template_used === true
  }

  /** The node that stands where the tree begins now. */
  get top(): number {
    const hoisted = this.hoisted.value
    return hoisted[hoisted.length - 1] ?? ROOT
  }

  /** There is nothing to follow any more. */
  lose(how: 'removed' | 'unknown'): void {
    this.gone.value = how
    this.feed.close()
  }

  get isGrowing(): boolean {
    return [...this.lanes.value.values()].some((lane) => !lane.isOver)
  }

  /** Whether a node grows, or something grows from it: its text must stay as it is until then. */
  growsAt(number: number): boolean {
    const lanes = [...this.lanes.peek().values()]
    return lanes.some((lane) => !lane.isOver && (lane.node === number || lane.parent === number))
  }

  // Loading and following

  /** Read all nodes, page by page; the first is shown at once. */
  async load(): Promise<void> {
    const seen = new Set<number>()
    let after: string | null = null
    do {
      const page: Schemas['NodePage'] = await api.nodes(this.id, { limit: PAGE, after })
      batch(() => {
        this.tree.put(page.data)
        for (const each of page.data) seen.add(each.node)
        this.tree.rev = page.rev
        this.loading.value = { done: seen.size, total: Math.max(this.info.peek().n_nodes, seen.size) }
      })
      after = page.next ?? null
    } while (after !== null)
    batch(() => {
      this.tree.keepOnly(seen)
      this.loading.value = null
      this.isLoaded = true
      for (const take of this.early) take()
      this.early = []
      this.settle()
      for (const each of this.drafts.all.peek())
        if (!this.tree.get(each.node)) this.drafts.stray(each.node, this.current.peek())
    })
    for (const job of (await api.runs(this.id)).data.reverse()) this.searches.adopt(job)
  }

  /** Go where an address says: what was made elsewhere a moment ago may yet have to be heard of. */
  async visit(to: number): Promise<void> {
    if (this.isLoaded && !this.tree.get(to)) await this.refresh()
    this.go(to)
  }

  /** Ask for what has changed since a revision, as a rule the one that is known. Raises: ApiError. */
  async refresh(since = this.tree.rev): Promise<void> {
    const page = await api.nodes(this.id, { since, limit: PAGE })
    if (page.whole) return this.load()
    if (page.rev < this.tree.rev) return this.refresh(since) // the feed told of a later change meanwhile
    const data = [...page.data]
    for (let after = page.next ?? null; after !== null; ) {
      const more: Schemas['NodePage'] = await api.nodes(this.id, { since, limit: PAGE, after })
      data.push(...more.data)
      after = more.next ?? null
    }
    this.applyNodes(page.removed ?? [], data, {}, page.rev)
  }

  private handlers(): FeedHandlers {
    const later =
      <Data>(take: (data: Data) => void) =>
      (data: Data) => {
        if (this.isLoaded) batch(() => take(data))
        else this.early.push(() => take(data))
      }
    return {
      snapshot: later((data) => this.onSnapshot(data)),
      job: later((data) => this.onJob(data)),
      tok: later((data) => this.onTokens(data)),
      branch: later((data) => this.onBranch(data)),
      score: later((data) => this.onScore(data)),
      change: later((data) => this.onChange(data)),
      error: later((data) => this.onError(data)),
      done: later((data) => this.onDone(data)),
      renamed: (data) => {
        this.info.value = { ...this.info.peek(), name: data.name }
      },
      removed: () => this.lose('removed'),
    }
  }

  private onSnapshot(data: FeedEvents['snapshot']): void {
    const running = new Set(data.jobs.map((each) => each.id))
    const lost: Lane[] = []
    for (const [job, known] of [...this.jobs]) {
      if (running.has(job)) continue
      lost.push(...[...known.branches.values()].filter((lane) => !lane.isOver))
      for (const lane of known.branches.values()) this.endLane(lane, lane.finish)
      this.jobs.delete(job)
    }
    for (const run of this.runs.peek()) {
      if (run.status === 'running' && !running.has(run.job)) this.searches.reread(run.job)
    }
    if (data.rev !== this.tree.rev || lost.length) this.refresh().then(() => this.tellOfEnds(lost), failed)
    for (const job of data.jobs) {
      this.begin(job.id, job.texts, job.asked ?? undefined)
      if (job.kind === 'run') this.searches.adopt(job)
      for (const told of job.texts) {
        const lane = this.jobs.get(job.id)?.branches.get(told.branch)
        if (!lane) continue
        lane.text = told.text ?? ''
        lane.nTokens = told.n_tokens ?? 0
        if (told.finish_reason) this.endLane(lane, told.finish_reason)
        else this.paint(lane)
      }
    }
  }

  /** Branches ended while nobody listened: how, and whether the server was stopped under them. */
  private tellOfEnds(lanes: readonly Lane[]): void {
    for (const lane of lanes) {
      lane.finish = this.tree.get(lane.node)?.finish_reason ?? lane.finish
      this.paint(lane)
    }
    const n = lanes.filter((lane) => lane.finish === 'interrupted').length
    if (n)
      toast(`The server was stopped: ${plural(n, 'branch was', 'branches were')} interrupted.`, {
        detail: 'Their text is saved; you can continue them.',
      })
  }

  private onJob(data: FeedEvents['job']): void {
    this.begin(data.job, data.branches, data.asked ?? undefined)
  }

  /** Note a job's branches: they are nodes from now on. Known ones stay as they are. */
  begin(job: string, branches: readonly BranchEvent[], asked?: Record<string, unknown>): void {
    this.asking.value = null
    if (this.ended.has(job)) return
    if (asked !== undefined) this.searches.note(job, asked)
    let known = this.jobs.get(job)
    if (!known) {
      // Those of the last call have had their time; of what failed nothing else is left.
      if (!this.isGrowing)
        this.lanes.value = new Map([...this.lanes.peek()].filter(([, lane]) => isFailed(lane)))
      known = { branches: new Map() }
      this.jobs.set(job, known)
    }
    const lanes = new Map(this.lanes.peek())
    for (const told of branches) {
      if (known.branches.has(told.branch)) continue
      const lane = new Lane(job, told.branch, told.node, told.parent, told.model ?? null)
      known.branches.set(told.branch, lane)
      lanes.set(told.node, lane)
      if (!this.tree.get(told.node)) this.tree.put([provisional(told)])
    }
    this.lanes.value = lanes
    const numbers = branches.map((each) => each.node)
    this.searches.change(job, (run) => ({ nodes: [...new Set([...run.nodes, ...numbers])] }))
  }

  private onTokens(data: FeedEvents['tok']): void {
    const job = this.jobs.get(data.job)
    const byBranch = Map.groupBy(data.t, (each) => each[0])
    for (const [branch, tokens] of byBranch) {
      const lane = job?.branches.get(branch)
      if (!lane || lane.isOver) continue
      lane.take(tokens)
      this.paint(lane)
    }
  }

  private onBranch(data: FeedEvents['branch']): void {
    const lane = this.jobs.get(data.job)?.branches.get(data.branch)
    if (!lane) return
    lane.kept = data.kept
    lane.nTokens = data.n_tokens
    this.endLane(lane, data.finish_reason)
    const node = this.tree.get(data.node)
    if (!node) return
    if (!data.kept) {
      this.tree.remove([data.node])
      this.settle()
      return
    }
    node.finish_reason = data.finish_reason
    node.stop_string = data.stop_string
    node.ended = data.ended
    node.n_tokens = data.n_tokens
    this.tree.touch()
  }

  /** Branches that failed, below a node or anywhere. */
  failedLanes(parent: number | null = null): Lane[] {
    const all = [...this.lanes.peek().values()].filter(isFailed)
    return parent === null ? all : all.filter((lane) => lane.parent === parent)
  }

  dismissLanes(gone: readonly Lane[]): void {
    this.lanes.value = new Map([...this.lanes.peek()].filter(([, lane]) => !gone.includes(lane)))
  }

  /** Dismiss lanes for what is asked for in their place; they are back where that was refused. */
  async replaceLanes<Made>(gone: readonly Lane[], ask: () => Promise<Made | undefined>): Promise<boolean> {
    this.dismissLanes(gone)
    const made = await ask()
    if (made === undefined)
      this.lanes.value = new Map([...gone.map((lane) => [lane.node, lane] as const), ...this.lanes.peek()])
    return made !== undefined
  }

  private endLane(lane: Lane, finish: string | null): void {
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

  private onScore(data: FeedEvents['score']): void {
    this.searches.change(data.job, (run) => ({
      rounds: [...run.rounds.filter((each) => each.round < data.round), data],
    }))
    for (const each of data.candidates) {
      const node = this.tree.get(each.node)
      if (node && each.score !== undefined) node.score = each.score
    }
    this.tree.touch()
  }

  private onError(data: FeedEvents['error']): void {
    const job = this.jobs.get(data.job)
    for (const lane of job?.branches.values() ?? []) {
      if (lane.isOver && lane.state !== 'failed') continue
      lane.error = data.message
      lane.state = 'failed'
      this.paint(lane)
    }
    this.searches.change(data.job, () => ({ error: data.message }))
    const parents = new Set([...(job?.branches.values() ?? [])].map((lane) => lane.parent))
    this.lastError.value = {
      error: new ApiError(500, data.code, data.message, data.hint, null, data.details, data.request_id),
      nodes: [...parents],
    }
  }

  private onDone(data: FeedEvents['done']): void {
    const lanes = [...(this.jobs.get(data.job)?.branches.values() ?? [])]
    for (const lane of lanes) this.endLane(lane, lane.finish)
    const full = lanes.find((lane) => lane.finish === 'context')
    if (full) this.lastError.value = { error: this.contextFull(full.node), nodes: [full.parent] }
    this.searches.change(data.job, () => ({
      status: data.status,
      result: (data.result as RunResult | undefined) ?? null,
    }))
    this.jobs.delete(data.job)
    this.ended.add(data.job)
    // Lanes stay for as long as somebody looks at what they grew from.
    this.lanes.value = new Map(this.lanes.peek())
    this.tree.touch()
  }

  /** That a branch came to the end of the context is told as a prompt that is too long. */
  private contextFull(node: number): ApiError {
    const n = this.tree.path(node).reduce((sum, each) => sum + this.tree.get(each)!.n_tokens, 0)
    const message = 'the branch has reached the end of the context'
    return new ApiError(400, 'context_length_exceeded', message, '', null, { n_prompt_tokens: n })
  }

  private onChange(data: FeedEvents['change']): void {
    if (!data.whole) {
      this.refresh().catch(failed)
      return
    }
    this.told = Math.max(this.told, data.rev)
    this.take(data)
  }

  /** Take in a call's own answer, unless the feed was faster: it may have told of later changes, too. */
  apply(change: Change): void {
    if (change.rev > this.told) this.take(change)
  }

  private take(change: Change): void {
    overtaken(change.rev)
    for (const node of change.added ?? []) this.tokens.forget(node.node)
    const nodes = [...(change.added ?? []), ...(change.changed ?? [])]
    const rev = Math.max(this.tree.rev, change.rev)
    this.applyNodes(change.removed ?? [], nodes, change.children ?? {}, rev)
  }

  /**
   * Put nodes, then remove others. In this order a node whose parent is removed by a merge has its new parent
   * before the removal deletes what is below the old one.
   */
  private applyNodes(
    removed: readonly number[],
    nodes: readonly Node[],
    children: Record<string, number[]>,
    rev: number,
  ): void {
    batch(() => {
      const was = this.current.peek()
      const next = this.standsAfter(removed) // by the order of siblings before the change
      this.put(nodes)
      this.tree.order(children)
      const isRemoved = this.tree.path(was).some((each) => removed.includes(each))
      const stands = this.strayed(removed) ?? (isRemoved ? next : was)
      this.tree.remove(removed)
      this.tree.rev = rev
      if (this.tree.get(stands)) this.current.value = stands
      this.settle()
      this.goBack(was)
    })
  }

  private put(nodes: readonly Node[]): void {
    const isOther = nodes.some((node) => {
      const known = this.tree.get(node.node)
      return known && !known.growing && (known.text !== node.text || known.parent !== node.parent)
    })
    this.tree.put(nodes)
    if (!isOther) return
    this.tokens.clear() // those of what stands below, too
    this.weighed.value += 1
  }

  /**
   * Nodes will go: texts that are being written at them are to stand below what these hang from.
   * Returns where that is for the one that is open, else null.
   */
  private strayed(removed: readonly number[]): number | null {
    const { tree, drafts } = this
    if (!removed.length || !drafts.all.peek().length) return null
    const gone = new Set(removed)
    let stands: number | null = null
    for (const draft of drafts.all.peek()) {
      const top = tree.path(draft.node).find((each) => gone.has(each))
      const to = top === undefined ? null : tree.parent(top)
      if (to === null) continue
      if (draft.isOpen) stands = to
      drafts.stray(draft.node, to)
    }
    return stands
  }

  /** Where one stands once nodes have gone: at the next sibling, else the one before, else the parent. */
  private standsAfter(removed: readonly number[]): number {
    const { tree } = this
    const current = this.current.peek()
    const gone = new Set(removed)
    const top = gone.size ? tree.path(current).find((each) => gone.has(each)) : undefined
    if (top === undefined) return current
    if (this.next !== null && !gone.has(this.next)) return this.next
    const siblings = tree.siblings(top)
    const at = siblings.indexOf(top)
    const stays = (each: number) => !gone.has(each)
    return (
      siblings.slice(at + 1).find(stays) ?? siblings.slice(0, at).findLast(stays) ?? tree.parent(top) ?? ROOT
    )
  }

  /**
   * Whoever stood at a node that went, and has not moved since, stands there again once it is back,
   * but not in the middle of writing.
   */
  private goBack(was: number): void {
    const now = this.current.peek()
    if (!this.tree.get(was)) this.left = { node: was, at: now }
    else if (this.left?.at === now && this.tree.get(this.left.node) && !this.drafts.open) {
      this.current.value = this.left.node
      this.left = null
    }
  }

  /** After nodes went: stand at a node that is there. */
  private settle(): void {
    const { tree } = this
    const hoisted = this.hoisted.peek().filter((each) => tree.get(each))
    if (hoisted.length !== this.hoisted.peek().length) this.hoisted.value = hoisted
    const selected = [...this.selected.peek()].filter((each) => tree.get(each))
    if (selected.length !== this.selected.peek().size) this.selected.value = new Set(selected)
    if (!tree.get(this.current.peek())) this.current.value = this.nearest(this.current.peek())
  }

  /** Where to stand when a node has gone: its parent was noted when it was visited. */
  private nearest(number: number): number {
    for (const [parent, child] of this.lastChild) if (child === number && this.tree.get(parent)) return parent
    return this.top
  }

  private paint(lane: Lane): void {
    this.dirty.add(lane)
    if (this.painting) return
    this.painting = true
    setTimeout(
      () => {
        this.painting = false
        batch(() => {
          for (const each of this.dirty) {
            const node = this.tree.get(each.node)
            if (node && !each.isOver) {
              node.text = each.text
              node.n_tokens = each.nTokens
              node.mean_p = each.meanP
            }
            each.version.value += 1
          }
          this.dirty.clear()
        })
      },
      PAINT_MS + lane.text.length / LETTERS_A_MS,
    )
  }

  // Standing and moving

  /** Go to a node; it is seen by that. */
  go(number: number): void {
    if (!this.tree.get(number)) return
    batch(() => {
      if (number !== this.current.peek()) this.previous = this.current.peek()
      this.current.value = number
      for (const each of this.tree.path(number)) {
        const parent = this.tree.parent(each)
        if (parent !== null) this.lastChild.set(parent, each)
        if (!this.visited.has(each)) {
          this.visited.add(each)
          this.visitedVersion.value += 1
        }
      }
      const holds = (top: number) => this.tree.isBelow(number, top)
      if (!holds(this.top)) this.hoisted.value = this.hoisted.peek().filter(holds)
      const folded = [...this.collapsed.peek()].filter(
        (each) => each !== number && this.tree.isBelow(number, each),
      )
      if (folded.length) this.collapsed.value = without(this.collapsed.peek(), folded)
    })
    this.remember()
  }

  /** The child that was visited last, or the first. */
  childOf(number: number): number | null {
    const children = this.tree.children(number)
    const last = this.lastChild.get(number)
    return last !== undefined && children.includes(last) ? last : (children[0] ?? null)
  }

  isUnread(number: number): boolean {
    const node = this.tree.get(number)
    return node !== undefined && (node.growing || node.mean_p !== null) && !this.visited.has(number)
  }

  private remembering: number | undefined
  /** Note soon where one is. */
  remember(): void {
    clearTimeout(this.remembering)
    this.remembering = window.setTimeout(this.keep, 300)
  }

  private readonly keep = (): void => {
    clearTimeout(this.remembering)
    const kept: Remembered = {
      current: this.current.peek(),
      collapsed: [...this.collapsed.peek()],
      hoisted: [...this.hoisted.peek()],
      visited: [...this.visited].slice(-20_000),
      lastChild: Object.fromEntries(this.lastChild),
    }
    write(`loom.${this.id}`, kept)
  }
}

const isFailed = (lane: Lane) => lane.state === 'failed'

function provisional(told: BranchEvent) {
  return {
    node: told.node,
    id: told.id,
    parent: told.parent,
    model: told.model ?? null,
    children: [],
    n_below: 0,
    text: told.text ?? '',
    n_tokens: told.n_tokens ?? 0,
    mean_p: null,
    mean_logprob: null,
    finish_reason: told.finish_reason ?? null,
    ended: false,
    growing: told.finish_reason == null,
  }
}

export function without<Value>(set: ReadonlySet<Value>, gone: Iterable<Value>): Set<Value> {
  const rest = new Set(set)
  for (const each of gone) rest.delete(each)
  return rest
}
