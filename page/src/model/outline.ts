/** The tree as rows: chains on one row, equal siblings on one, what is folded left out. */
import { type LoomTree, ROOT } from './tree'

export interface Row {
  /** Nodes of this row, each the only child of the one before. */
  chain: readonly number[]
  /** Siblings of the same text that this row stands for, its own first; empty where it is alone. */
  same: readonly number[]
  /** The node of the chain that the row shows, unless the current node is in the chain. */
  face: number
  depth: number
  /** The index of the row that it hangs from; -1 for the first. */
  above: number
  /** The index of the next row that hangs from the same; -1 for the last. */
  next: number
  /** How many children its last node has. */
  nChildren: number
  /** True if the rows below it are hidden; null: there are none. */
  isFolded: boolean | null
  /** Its place among those that hang from the same row, from 1, and how many these are. */
  at: number
  of: number
}

export interface Shown {
  top: number
  collapsed: ReadonlySet<number>
  /** Parents whose equal children each have a row. */
  unfolded: ReadonlySet<number>
  /** Only these nodes and what is above them, nothing folded; null: all. */
  only: ReadonlySet<number> | null
}

export class Outline {
  readonly rows: Row[] = []
  private readonly byNode = new Map<number, number>()

  /** Cost: O(nodes that are shown). */
  constructor(
    private readonly tree: LoomTree,
    shown: Shown,
  ) {
    if (tree.get(shown.top)) this.build(shown)
  }

  /** The index of the row that shows a node: its own, or the folded one above it; -1 if there is none. */
  rowOf(node: number): number {
    for (let at: number | null = node; at !== null; at = this.tree.parent(at)) {
      const index = this.byNode.get(at)
      if (index !== undefined) return index
    }
    return -1
  }

  /** The rows that a path goes through, from the first. */
  path(node: number): number[] {
    const path: number[] = []
    for (let at = this.rowOf(node); at >= 0; at = this.rows[at]!.above) path.push(at)
    return path.reverse()
  }

  /** The node that a row shows. */
  shownNodeOf(row: Row, current: number): number {
    return row.chain.includes(current) || row.same.includes(current) ? current : row.face
  }

  /** The nodes of the rows from one node to another, inclusive. */
  range(from: number, to: number): number[] {
    const [low, high] = [this.rowOf(from), this.rowOf(to)].sort((a, b) => a - b) as [number, number]
    return this.rows
      .slice(Math.max(0, low), high + 1)
      .flatMap((row) => (row.same.length ? row.same : [row.face]))
  }

  private build(shown: Shown): void {
    const above = withAncestors(this.tree, shown.only)
    type Waiting = { node: number; same: number[]; above: number; depth: number; at: number; of: number }
    const stack: Waiting[] = [{ node: shown.top, same: [], above: -1, depth: 0, at: 1, of: 1 }]
    const lastBelow = new Map<number, number>()
    while (stack.length) {
      const { node, same, ...place } = stack.pop()!
      const index = this.rows.length
      const chain = this.chain(node, shown, above)
      const end = chain[chain.length - 1]!
      const all = this.known(end)
      const children = above ? all.filter((each) => above.has(each)) : all
      const isFolded = children.length ? shown.only === null && shown.collapsed.has(end) : null
      const face = shown.only ? (chain.find((each) => shown.only!.has(each)) ?? end) : node
      this.rows.push({ chain, same, face, ...place, next: -1, nChildren: all.length, isFolded })
      for (const member of chain) this.byNode.set(member, index)
      for (const member of same) this.byNode.set(member, index)
      const before = lastBelow.get(place.above)
      if (before !== undefined) this.rows[before]!.next = index
      lastBelow.set(place.above, index)
      if (isFolded) continue
      const groups = shown.unfolded.has(end) ? children.map((each) => [each]) : this.grouped(children)
      for (let i = groups.length - 1; i >= 0; i--) {
        const group = groups[i]!
        const same = group.length > 1 ? group : []
        const depth = place.depth + 1
        stack.push({ node: group[0]!, same, above: index, depth, at: i + 1, of: groups.length })
      }
    }
  }

  /** A node and what follows it without siblings. The top has its row to itself; a hit ends a row. */
  private chain(node: number, shown: Shown, above: ReadonlySet<number> | null): number[] {
    const chain = [node]
    if (node === shown.top || node === ROOT) return chain
    for (;;) {
      const end = chain[chain.length - 1]!
      if (shown.only?.has(end) || (!shown.only && shown.collapsed.has(end))) return chain
      // In a tree of hits what has siblings keeps its place, though they are not shown.
      const children = this.known(end)
      if (children.length !== 1 || (above && !above.has(children[0]!))) return chain
      chain.push(children[0]!)
    }
  }

  /** The children that are loaded. Without a copy if all are: every node calls this. */
  private known(node: number): readonly number[] {
    const children = this.tree.get(node)?.children ?? []
    if (this.tree.isSorted) return this.tree.children(node)
    return children.every((each) => this.tree.get(each)) ? children : this.tree.children(node)
  }

  /** Children, those together that have the same text and nothing below; at the place of the first. */
  private grouped(children: readonly number[]): number[][] {
    if (children.length < 2) return children.map((each) => [each])
    const groups: number[][] = []
    const byText = new Map<string, number[]>()
    for (const child of children) {
      const node = this.tree.get(child)!
      const known = byText.get(node.text)
      if (node.growing || node.bookmark != null || this.known(child).length) groups.push([child])
      else if (known) known.push(child)
      else {
        const group = [child]
        byText.set(node.text, group)
        groups.push(group)
      }
    }
    return groups
  }
}

function withAncestors(tree: LoomTree, only: ReadonlySet<number> | null): ReadonlySet<number> | null {
  if (!only) return null
  const all = new Set<number>()
  for (const node of only)
    for (let at: number | null = node; at !== null && !all.has(at); at = tree.parent(at)) all.add(at)
  return all
}
