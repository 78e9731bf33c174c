/** Hoist and fold subtrees. */
import { without } from '../position'
import { open } from '../session'

export function hoist(node: number): void {
  const loom = open.peek()
  if (!loom || loom.top === node) return
  loom.hoisted.value = [...loom.hoisted.peek(), node]
  if (!loom.tree.isBelow(loom.current.peek(), node)) loom.current.value = node
  loom.position.saveSoon()
}

export function unhoist(): void {
  const loom = open.peek()
  if (!loom) return
  loom.hoisted.value = loom.hoisted.peek().slice(0, -1)
  loom.position.saveSoon()
}

export function collapse(nodes: number[], isCollapsed: boolean): void {
  const loom = open.peek()
  if (!loom) return
  const now = loom.collapsed.peek()
  loom.collapsed.value = isCollapsed ? new Set([...now, ...nodes]) : without(now, nodes)
  loom.position.saveSoon()
}
