/** The tree of a loom as the page knows it: nodes by number, kept in step with the server. */
import { signal } from '@preact/signals'
import type { Node } from '../api/client'

export const ROOT = 0
/** The value of a node in an order of siblings; null: after those with a value. */
export type SortValue = (node: Node) => number | null

export class LoomTree {
  readonly nodes = new Map<number, Node>()
  /** Rises with every change of the tree; what reads it is drawn again. */
  readonly version = signal(0)
  rev = 0
  /** The value by which siblings are sorted, highest first; null: the order of the loom. */
  private sortValue: SortValue | null = null
  private sortedAt = -1
  private readonly sorted = new Map<number, number[]>()
  private sizesAt = -1
  private sizesNow = new Map<number, number>()

  get(number: number): Node | undefined {
    return this.nodes.get(number)
  }

  get size(): number {
    return this.nodes.size
  }

  /** Add or replace nodes of the server, parents first. */
  put(nodes: readonly Node[]): void {
    for (const node of nodes) {
      const known = this.nodes.get(node.node)
      if (known && known.parent !== node.parent) this.detach(known)
      this.nodes.set(node.node, node)
      this.attach(node)
    }
    this.touch()
  }

  /** Set the order of children, as the server has it. */
  order(children: Record<string, number[]>): void {
    for (const [parent, numbers] of Object.entries(children)) {
      const node = this.nodes.get(Number(parent))
      if (node) node.children = numbers.filter((each) => this.nodes.has(each))
    }
    this.touch()
  }

  /** Take nodes away, and what stands below them. */
  remove(numbers: readonly number[]): void {
    for (const number of numbers) {
      const node = this.nodes.get(number)
      if (!node) continue
      this.detach(node)
      for (const descendant of [...this.preorder(number)]) this.nodes.delete(descendant)
    }
    this.touch()
  }

  /** Remove all other nodes: `numbers` are the nodes of a full read of the loom. */
  keepOnly(numbers: ReadonlySet<number>): void {
    this.remove([...this.nodes.keys()].filter((each) => !numbers.has(each)))
  }

  touch(): void {
    this.version.value += 1
  }

  private attach(node: Node): void {
    const parent = node.parent === null ? undefined : this.nodes.get(node.parent)
    if (parent && !parent.children.includes(node.node)) parent.children.push(node.node)
  }

  private detach(node: Node): void {
    const parent = node.parent === null ? undefined : this.nodes.get(node.parent)
    if (parent) parent.children = parent.children.filter((each) => each !== node.node)
  }

  // Walking

  /** The children that are known here, sorted if an order is set. */
  children(number: number): number[] {
    if (this.sortValue === null) return this.unsorted(number)
    if (this.sortedAt !== this.version.peek()) {
      this.sorted.clear()
      this.sortedAt = this.version.peek()
    }
    let children = this.sorted.get(number)
    if (!children) {
      children = sortedBy(this.unsorted(number), this.sortValue, this.nodes)
      this.sorted.set(number, children)
    }
    return [...children]
  }

  get isSorted(): boolean {
    return this.sortValue !== null
  }

  /** Sort siblings by a value of each node; null: the order of the loom. */
  sortBy(value: SortValue | null): void {
    if (value === this.sortValue) return
    this.sortValue = value
    this.sortedAt = -1
    this.touch()
  }

  private unsorted(number: number): number[] {
    return (this.nodes.get(number)?.children ?? []).filter((each) => this.nodes.has(each))
  }

  parent(number: number): number | null {
    return this.nodes.get(number)?.parent ?? null
  }

  /** Numbers from the root to a node. */
  path(number: number): number[] {
    const path: number[] = []
    for (let at: number | null = number; at !== null && this.nodes.has(at); at = this.parent(at))
      path.push(at)
    return path.reverse()
  }

  siblings(number: number): number[] {
    const parent = this.parent(number)
    return parent === null ? [number] : this.children(parent)
  }

  isBelow(number: number, top: number): boolean {
    for (let at: number | null = number; at !== null; at = this.parent(at)) if (at === top) return true
    return false
  }

  *preorder(top: number = ROOT): Generator<number> {
    const stack = [top]
    while (stack.length) {
      const number = stack.pop()!
      if (!this.nodes.has(number)) continue
      yield number
      const children = this.children(number)
      for (let i = children.length - 1; i >= 0; i--) stack.push(children[i]!)
    }
  }

  /** How many nodes stand below one. Cost: O(nodes) after a change, else O(1). */
  below(number: number): number {
    if (this.sizesAt !== this.version.peek()) {
      this.sizesNow = new Map()
      const order = [...this.preorder()]
      for (const node of order) this.sizesNow.set(node, 0)
      for (const node of order.reverse()) {
        const parent = this.parent(node)
        if (parent !== null)
          this.sizesNow.set(parent, this.sizesNow.get(parent)! + 1 + this.sizesNow.get(node)!)
      }
      this.sizesAt = this.version.peek()
    }
    return this.sizesNow.get(number) ?? 0
  }

  leaves(top: number = ROOT): number[] {
    return [...this.preorder(top)].filter((each) => this.children(each).length === 0)
  }

  /** The first node with several children above a node (exclusive), or below it along first children. */
  branchPoint(number: number, direction: -1 | 1, pick: (children: number[]) => number): number | null {
    let at: number | null = number
    for (;;) {
      at = direction < 0 ? this.parent(at) : this.children(at).length ? pick(this.children(at)) : null
      if (at === null) return null
      if (this.children(at).length > 1) return at
    }
  }
}

/** Return true if a person wrote the node: it was not sampled. */
export const isHuman = (node: Node): boolean =>
  node.parent !== null && node.finish_reason === null && !node.growing && node.mean_p === null

/** Nodes by a value, highest first; equal ones, and those without a value, in their order. */
function sortedBy(numbers: number[], value: SortValue, nodes: ReadonlyMap<number, Node>): number[] {
  const values = new Map(numbers.map((each) => [each, value(nodes.get(each)!) ?? -Infinity]))
  return numbers.sort((a, b) => (values.get(a) === values.get(b) ? 0 : values.get(b)! - values.get(a)!))
}
