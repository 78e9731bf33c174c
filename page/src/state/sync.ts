/** Keep the tree of an open loom equal to the server's: load all nodes, then apply changes. */
import { batch, type Signal, signal } from '@preact/signals'
import { api, type Loom, type Node, type Schemas } from '../api/client'
import type { FeedEvents } from '../api/feed'
import { type LoomTree, ROOT } from '../model/tree'
import type { Drafts } from './drafts'
import type { Position } from './position'
import type { Searches } from './searches'
import { failed, withdrawUndo } from './toasts'
import type { TokenCache } from './tokens'

const PAGE = 1000 // nodes per request

type Change = Pick<Schemas['Changed'], 'rev' | 'added' | 'changed' | 'removed'> &
  Partial<FeedEvents['change']>

export class Sync {
  /** How many of all nodes are loaded; null after loading. */
  readonly loading = signal<{ done: number; total: number } | null>({ done: 0, total: 1 })
  /** Increases when an existing node changes its text or its parent: probabilities below it change, too. */
  readonly contextVersion = signal(0)
  /** The last revision that the feed has reported. */
  private feedRev = 0
  private isLoaded = false
  private readonly waiting: (() => void)[] = []

  constructor(
    private readonly info: Signal<Loom>,
    private readonly tree: LoomTree,
    private readonly position: Position,
    private readonly drafts: Drafts,
    private readonly tokens: TokenCache,
    private readonly searches: Searches,
  ) {}

  private get loom(): string {
    return this.info.peek().id
  }

  /** Call now, or once all nodes are loaded. */
  whenLoaded(call: () => void): void {
    if (this.isLoaded) batch(call)
    else this.waiting.push(call)
  }

  /** Read all nodes, page by page, then the searches. The first nodes are shown at once. */
  async load(): Promise<void> {
    const loaded = new Set<number>()
    let after: string | null = null
    do {
      const page: Schemas['NodePage'] = await api.nodes(this.loom, { limit: PAGE, after })
      batch(() => {
        this.tree.put(page.data)
        for (const node of page.data) loaded.add(node.node)
        this.tree.rev = page.rev
        const total = Math.max(this.info.peek().n_nodes, loaded.size)
        this.loading.value = { done: loaded.size, total }
      })
      after = page.next ?? null
    } while (after !== null)
    batch(() => this.finishLoading(loaded))
    for (const job of (await api.runs(this.loom)).data.reverse()) this.searches.adopt(job)
  }

  private finishLoading(loaded: ReadonlySet<number>): void {
    this.tree.keepOnly(loaded)
    this.loading.value = null
    this.isLoaded = true
    for (const call of this.waiting.splice(0)) call()
    this.position.adjust()
    for (const draft of this.drafts.all.peek())
      if (!this.tree.get(draft.node)) this.drafts.stray(draft.node, this.position.current.peek())
  }

  /** Read a node that another client may have added a moment ago. */
  async ensure(node: number): Promise<void> {
    if (this.isLoaded && !this.tree.get(node)) await this.refresh()
  }

  /** Read what has changed since a revision, by default the tree's. Raises: ApiError. */
  async refresh(since = this.tree.rev): Promise<void> {
    const page = await api.nodes(this.loom, { since, limit: PAGE })
    if (page.whole) return this.load()
    if (page.rev < this.tree.rev) return this.refresh(since) // the feed has reported a later change
    const data = [...page.data]
    for (let after = page.next ?? null; after !== null; ) {
      const more: Schemas['NodePage'] = await api.nodes(this.loom, { since, limit: PAGE, after })
      data.push(...more.data)
      after = more.next ?? null
    }
    this.applyNodes(page.removed ?? [], data, {}, page.rev)
  }

  /** Apply a change that the feed reports, or read it if the event is too large to contain it. */
  applyEvent(change: FeedEvents['change']): void {
    if (!change.whole) {
      this.refresh().catch(failed)
      return
    }
    this.feedRev = Math.max(this.feedRev, change.rev)
    this.applyChange(change)
  }

  /** Apply the reply to a call, unless the feed has already reported this or a later change. */
  applyReply(change: Change): void {
    if (change.rev > this.feedRev) this.applyChange(change)
  }

  private applyChange(change: Change): void {
    withdrawUndo(change.rev)
    for (const node of change.added ?? []) this.tokens.forget(node.node)
    const nodes = [...(change.added ?? []), ...(change.changed ?? [])]
    const rev = Math.max(this.tree.rev, change.rev)
    this.applyNodes(change.removed ?? [], nodes, change.children ?? {}, rev)
  }

  /**
   * Put nodes, then remove others. A merge removes the old parent of a node: the node must have its new parent
   * before that, or the removal would delete it.
   */
  private applyNodes(
    removed: readonly number[],
    nodes: readonly Node[],
    children: Record<string, number[]>,
    rev: number,
  ): void {
    batch(() => {
      const { position, tree } = this
      const before = position.current.peek()
      const after = position.after(removed) // by the order of siblings before the change
      this.put(nodes)
      tree.order(children)
      const isRemoved = tree.path(before).some((each) => removed.includes(each))
      const current = this.moveDrafts(removed) ?? (isRemoved ? after : before)
      tree.remove(removed)
      tree.rev = rev
      position.update(before, current)
    })
    if (nodes.some((node) => node.node === ROOT)) this.readInfo().catch(failed)
  }

  /** Read the prompt and the notes of the loom: a change of the root may have changed them. */
  private async readInfo(): Promise<void> {
    this.info.value = await api.loom(this.loom)
  }

  private put(nodes: readonly Node[]): void {
    const isOther = nodes.some((node) => {
      const known = this.tree.get(node.node)
      return known && !known.growing && (known.text !== node.text || known.parent !== node.parent)
    })
    this.tree.put(nodes)
    if (!isOther) return
    this.tokens.clear() // including tokens of nodes below
    this.contextVersion.value += 1
  }

  /** Move drafts at removed nodes to the nearest remaining ancestor. Returns that of the open draft, else null. */
  private moveDrafts(removed: readonly number[]): number | null {
    const { tree, drafts } = this
    if (!removed.length || !drafts.all.peek().length) return null
    const gone = new Set(removed)
    let current: number | null = null
    for (const draft of drafts.all.peek()) {
      const top = tree.path(draft.node).find((each) => gone.has(each))
      const parent = top === undefined ? null : tree.parent(top)
      if (parent === null) continue
      if (draft.isOpen) current = parent
      drafts.stray(draft.node, parent)
    }
    return current
  }
}
