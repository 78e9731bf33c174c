/** The user's position in an open loom: the current node, visited nodes, and folded and hoisted subtrees. */
import { batch, signal } from '@preact/signals'
import { type LoomTree, ROOT } from '../model/tree'
import type { Drafts } from './drafts'
import { read, write } from './storage'

const SAVE_DELAY_MS = 300
const MAX_SAVED_VISITS = 20_000

/** The part of a position that this browser stores. */
interface SavedPosition {
  current: number
  collapsed: number[]
  hoisted: number[]
  visited: number[]
  lastChild: Record<string, number>
}

const NOTHING_SAVED: SavedPosition = {
  current: ROOT,
  collapsed: [],
  hoisted: [],
  visited: [],
  lastChild: {},
}
const keyOf = (loom: string) => `loom.${loom}`

/** Store the node at which a new loom opens in this browser. */
export const openAt = (loom: string, node: number): void =>
  write(keyOf(loom), { ...NOTHING_SAVED, current: node })

export class Position {
  readonly current = signal(ROOT)
  /** The node before the last jump. */
  previous = ROOT
  /** The node to show once the current one is removed, while its removal is under way. */
  next: number | null = null
  readonly collapsed = signal<ReadonlySet<number>>(new Set())
  /** Nodes shown as the root of the tree, the innermost last. */
  readonly hoisted = signal<readonly number[]>([])
  readonly selected = signal<ReadonlySet<number>>(new Set())
  readonly visitedVersion = signal(0)
  private readonly visited: Set<number>
  private readonly lastChild: Map<number, number>
  /** The removed node that was current, and the node that replaced it. */
  private replaced: { node: number; by: number } | null = null
  private saveTimer: number | undefined
  /** The address names another node than the stored one, and stored folds and hoists may hide it. */
  private mustReveal: boolean

  constructor(
    private readonly loom: string,
    private readonly tree: LoomTree,
    private readonly drafts: Drafts,
    wanted: number | null,
  ) {
    const saved = read<SavedPosition>(keyOf(loom), NOTHING_SAVED)
    this.current.value = wanted ?? saved.current
    this.mustReveal = this.current.peek() !== saved.current
    this.collapsed.value = new Set(saved.collapsed)
    this.hoisted.value = saved.hoisted
    this.visited = new Set(saved.visited)
    this.lastChild = new Map(
      Object.entries(saved.lastChild).map(([parent, child]) => [Number(parent), child]),
    )
    addEventListener('pagehide', this.save)
  }

  close(): void {
    removeEventListener('pagehide', this.save)
    this.save()
  }

  /** The node that is shown as the root of the tree. */
  get top(): number {
    const hoisted = this.hoisted.value
    return hoisted[hoisted.length - 1] ?? ROOT
  }

  /** Make a node current, and mark its path as visited. */
  navigate(number: number): void {
    if (!this.tree.get(number)) return
    batch(() => {
      if (number !== this.current.peek()) this.previous = this.current.peek()
      this.current.value = number
      for (const node of this.tree.path(number)) this.markVisited(node)
      this.reveal(number)
    })
    this.saveSoon()
  }

  private markVisited(number: number): void {
    const parent = this.tree.parent(number)
    if (parent !== null) this.lastChild.set(parent, number)
    if (this.visited.has(number)) return
    this.visited.add(number)
    this.visitedVersion.value += 1
  }

  /** Unfold and unhoist the subtrees that hide a node. */
  private reveal(number: number): void {
    const contains = (top: number) => this.tree.isBelow(number, top)
    if (!contains(this.top)) this.hoisted.value = this.hoisted.peek().filter(contains)
    const folded = [...this.collapsed.peek()].filter((each) => each !== number && contains(each))
    if (folded.length) this.collapsed.value = without(this.collapsed.peek(), folded)
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

  // Removed nodes

  /** The current node after a removal: `next`, else the next sibling, the previous sibling or the parent. */
  after(removed: readonly number[]): number {
    const { tree } = this
    const current = this.current.peek()
    const gone = new Set(removed)
    const top = gone.size ? tree.path(current).find((each) => gone.has(each)) : undefined
    if (top === undefined) return current
    if (this.next !== null && !gone.has(this.next)) return this.next
    const siblings = tree.siblings(top)
    const at = siblings.indexOf(top)
    const remains = (each: number) => !gone.has(each)
    return (
      siblings.slice(at + 1).find(remains) ??
      siblings.slice(0, at).findLast(remains) ??
      tree.parent(top) ??
      ROOT
    )
  }

  /**
   * Update the position after a change of the tree. If an undo restored the node that was current, and
   * the user has not moved or opened a draft since, that node becomes current again.
   */
  update(before: number, current: number): void {
    if (this.tree.get(current)) this.current.value = current
    this.dropRemoved()
    const now = this.current.peek()
    if (!this.tree.get(before)) this.replaced = { node: before, by: now }
    else if (this.replaced?.by === now && this.tree.get(this.replaced.node) && !this.drafts.open) {
      this.current.value = this.replaced.node
      this.replaced = null
    }
  }

  /** Adjust the stored position to the tree, once all nodes are loaded. */
  adjust(): void {
    this.dropRemoved()
    if (this.mustReveal) this.reveal(this.current.peek())
    this.mustReveal = false
    for (const node of this.tree.path(this.current.peek())) this.markVisited(node)
  }

  /** Forget hoisted and selected nodes that the tree no longer has, and leave a removed node. */
  dropRemoved(): void {
    const { tree } = this
    const hoisted = this.hoisted.peek().filter((each) => tree.get(each))
    if (hoisted.length !== this.hoisted.peek().length) this.hoisted.value = hoisted
    const selected = [...this.selected.peek()].filter((each) => tree.get(each))
    if (selected.length !== this.selected.peek().size) this.selected.value = new Set(selected)
    if (!tree.get(this.current.peek())) this.current.value = this.parentOfRemoved(this.current.peek())
  }

  /** The tree no longer has the node; its parent was noted when the user visited it. */
  private parentOfRemoved(number: number): number {
    for (const [parent, child] of this.lastChild) if (child === number && this.tree.get(parent)) return parent
    return this.top
  }

  // Storage

  saveSoon(): void {
    clearTimeout(this.saveTimer)
    this.saveTimer = window.setTimeout(this.save, SAVE_DELAY_MS)
  }

  private readonly save = (): void => {
    clearTimeout(this.saveTimer)
    const saved: SavedPosition = {
      current: this.current.peek(),
      collapsed: [...this.collapsed.peek()],
      hoisted: [...this.hoisted.peek()],
      visited: [...this.visited].slice(-MAX_SAVED_VISITS),
      lastChild: Object.fromEntries(this.lastChild),
    }
    write(keyOf(this.loom), saved)
  }
}

export function without<Value>(set: ReadonlySet<Value>, removed: Iterable<Value>): Set<Value> {
  const rest = new Set(set)
  for (const value of removed) rest.delete(value)
  return rest
}
