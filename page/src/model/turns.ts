/** A path as it is read: whose turn it is, and what of a node is shown. */
import type { Loom, Node } from '../api/client'
import type { LoomTree } from './tree'

export type Speaker = 'prompt' | 'you' | 'model' | 'text'
export interface Turn {
  who: Speaker
  nodes: number[]
}

/** The text of a node as people read it; special: with the tokens of the chat's template. */
export function shownText(node: Node, loom: Loom, special: boolean): string {
  if (special) return node.text
  if (node.parent === null) return loom.prompt && node.text.includes(loom.prompt) ? loom.prompt : node.text
  return node.said ?? node.text
}

/** The turns of a chat; a raw text is one. */
export function turnsOf(tree: LoomTree, path: readonly number[], isChat: boolean): Turn[] {
  const turns: Turn[] = []
  for (const number of path) {
    const node = tree.get(number)
    const who = !isChat ? 'text' : node?.parent === null || node?.said != null ? 'you' : 'model'
    const last = turns[turns.length - 1]
    if (last && last.who === who && who !== 'you') last.nodes.push(number)
    else turns.push({ who, nodes: [number] })
  }
  return turns
}

/** Children with the same text and nothing below are one row: the first of each, with all of them. */
export function groupEqualLeaves(tree: LoomTree, children: readonly number[]): number[][] {
  const rows: number[][] = []
  const byText = new Map<string, number[]>()
  for (const number of children) {
    const node = tree.get(number)
    const isLeaf = node && !tree.children(number).length && !node.growing && node.bookmark == null
    const same = isLeaf ? byText.get(node.text) : undefined
    if (same) same.push(number)
    else {
      const row = [number]
      rows.push(row)
      if (isLeaf) byText.set(node.text, row)
    }
  }
  return rows
}
