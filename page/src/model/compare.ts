/** Branches side by side: which ones, and where they begin to differ. */
import type { LoomTree } from './tree'

export const MAX_COMPARED = 6

/** The nodes to compare: those selected, else the children of the current node, else it and its siblings. */
export function comparedNodes(tree: LoomTree, current: number, selected: ReadonlySet<number>): number[] {
  const chosen = [...tree.preorder()].filter((each) => selected.has(each))
  for (const nodes of [chosen, tree.children(current), tree.siblings(current)])
    if (nodes.length > 1) return around(nodes, current)
  return []
}

/** At most as many as fit side by side, the current one among them. */
function around(nodes: readonly number[], current: number): number[] {
  const from = Math.max(0, nodes.indexOf(current) + 1 - MAX_COMPARED)
  return nodes.slice(from, from + MAX_COMPARED)
}

/** How many characters all texts have in common at their beginning; it ends before a word that differs. */
export function commonBeginning(texts: readonly string[]): number {
  const [first = '', ...others] = texts
  let n = 0
  while (n < first.length && others.every((each) => each[n] === first[n])) n++
  if (texts.every((each) => each.length === n)) return n
  while (n > 0 && !/\s/.test(first[n] ?? ' ') && !/\s/.test(first[n - 1]!)) n--
  return n
}
