/** Mouse, drag and key events of the rows of the tree. */
import { signal } from '@preact/signals'
import { ROOT } from '../../model/tree'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { without } from '../../state/position'
import { toast } from '../../state/toasts'
import { showTree } from '../../state/view'
import { rowsOf } from './rows'

/** The node of the open menu, and the menu's position. */
export const menu = signal<{ node: number; x: number; y: number } | null>(null)
/** A node that is to stand below another one, which is being chosen. */
export const moving = signal<number | null>(null)
/** The node that is dragged with the mouse. */
let dragging: number | null = null
/** The ends of the current range of selected rows. */
const range = { from: -1, to: -1 }

function rowAt(target: EventTarget | null): { node: number; element: HTMLElement } | null {
  const element = target instanceof Element ? target.closest<HTMLElement>('[role=treeitem]') : null
  return element ? { node: Number(element.dataset['node']), element } : null
}

export const focusTree = () => document.querySelector<HTMLElement>('[role=tree]')?.focus()

/** The node of the row that something is in; -1 outside. */
export const nodeAt = (target: EventTarget | null): number => rowAt(target)?.node ?? -1

export function clickRow(loom: OpenLoom, event: MouseEvent): void {
  const row = rowAt(event.target)
  if (!row) return
  const button = (event.target as Element).closest<HTMLElement>('[data-do]')
  if (button) {
    if (button.dataset['do'] === 'go') loom.navigate(Number(button.dataset['to']))
    else runRowAction(loom, button.dataset['do']!, row.node, event.shiftKey)
  } else if (movedNode(loom) !== null) moveTo(loom, row.node)
  else if (event.shiftKey) selectTo(loom, row.node)
  else if (event.ctrlKey || event.metaKey) select(loom, row.node)
  else {
    if (loom.selected.peek().size) loom.selected.value = new Set()
    range.from = range.to = row.node
    loom.navigate(row.node)
  }
}

function runRowAction(loom: OpenLoom, what: string, node: number, navigates: boolean): void {
  if (what === 'fold') fold(loom, node)
  else if (what === 'same') showSame(loom, node)
  else if (what === 'bookmark') act.bookmark(node)
  else if (what === 'remove') act.remove(node)
  else if (what === 'grow') {
    if (navigates) loom.navigate(node)
    act.grow(node)
  }
}

/** Leave out what is below a row, or show it again. */
export function fold(loom: OpenLoom, node: number): void {
  const { outline } = rowsOf(loom)
  const row = outline.peek().rows[outline.peek().rowOf(node)]
  if (!row || row.isFolded === null) return
  const end = row.chain[row.chain.length - 1]!
  act.collapse(row.isFolded ? [...row.chain] : [end], !row.isFolded)
}

/** Give each of equal siblings a row, or one for all again. */
export function showSame(loom: OpenLoom, node: number): void {
  const parent = loom.tree.parent(node)
  if (parent === null) return
  const { unfolded } = rowsOf(loom)
  const now = unfolded.value
  unfolded.value = now.has(parent) ? without(now, [parent]) : new Set([...now, parent])
}

// Selecting

function sameAs(loom: OpenLoom, node: number): readonly number[] {
  const outline = rowsOf(loom).outline.peek()
  const row = outline.rows[outline.rowOf(node)]
  return row?.same.length ? row.same : [node]
}

/** Select a node, or not any more; of equal siblings on one row, all. */
export function select(loom: OpenLoom, node: number): void {
  const now = loom.selected.peek()
  const nodes = sameAs(loom, node)
  loom.selected.value = now.has(node) ? without(now, nodes) : new Set([...now, ...nodes])
  range.from = range.to = node
}

function selectTo(loom: OpenLoom, node: number): void {
  if (!loom.tree.get(range.from)) range.from = loom.current.peek()
  range.to = node
  loom.selected.value = new Set(rowsOf(loom).outline.peek().range(range.from, node))
}

export function selectAll(loom: OpenLoom, what: 'leaves' | 'bookmarks'): void {
  const { tree } = loom
  const nodes =
    what === 'leaves'
      ? tree.leaves(loom.top)
      : loom.bookmarks.peek().filter((each) => tree.isBelow(each, loom.top))
  loom.selected.value = new Set(nodes.filter((each) => !tree.get(each)?.growing))
  if (!nodes.length) toast('No bookmarks here.')
}

/** Keys of the focused tree, in addition to the page's. */
export function rowKey(loom: OpenLoom, event: KeyboardEvent): void {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key]
  if (by && event.shiftKey && !event.altKey && !event.ctrlKey && !event.metaKey) {
    if (!loom.selected.peek().size) range.from = range.to = loom.current.peek()
    const outline = rowsOf(loom).outline.peek()
    const row = outline.rows[outline.rowOf(range.to) + by]
    if (row) selectTo(loom, row.face)
    event.preventDefault()
  }
}

// Moving

export function beginMove(loom: OpenLoom, node: number): void {
  if (node === ROOT) return
  moving.value = node
  showTree()
  focusTree()
  if (loom.current.peek() !== node) loom.navigate(node)
}

/** The node that is being moved; null: none, or it has gone meanwhile. */
export function movedNode(loom: OpenLoom): number | null {
  const node = moving.peek()
  return node !== null && loom.tree.get(node) ? node : null
}

export function moveTo(loom: OpenLoom, parent: number): void {
  const node = movedNode(loom)
  if (node === null) return
  if (loom.tree.isBelow(parent, node)) {
    toast('A node cannot be moved below itself.')
    return
  }
  moving.value = null
  place(loom, node, parent)
}

function place(loom: OpenLoom, node: number, parent: number): void {
  if (loom.tree.parent(node) !== parent)
    act.move(node, parent).then((changed) => changed && loom.navigate(node))
}

/** Dragging a row onto another one moves its node below that. */
export function dragged(loom: OpenLoom, event: DragEvent): void {
  const row = rowAt(event.target)
  for (const element of document.querySelectorAll('.tree-row.over')) element.classList.remove('over')
  if (event.type === 'dragstart') {
    if (!row || row.node === ROOT) {
      event.preventDefault()
      return
    }
    dragging = row.node
    event.dataTransfer?.setData('text/plain', loom.tree.get(row.node)?.text ?? '')
    if (event.dataTransfer) event.dataTransfer.effectAllowed = 'move'
  } else if (event.type === 'dragend') dragging = null
  else if (row && dragging !== null && !loom.tree.isBelow(row.node, dragging)) {
    event.preventDefault()
    if (event.type === 'dragover') row.element.classList.add('over')
    else place(loom, dragging, row.node)
  }
}

// The menu

export function menuAt(loom: OpenLoom, event: MouseEvent): void {
  event.preventDefault()
  const row = rowAt(event.target)
  if (row) menu.value = { node: row.node, x: event.clientX, y: event.clientY }
  else openMenuAtCurrent(loom)
}

/** The menu of the current node, at its row. */
export function openMenuAtCurrent(loom: OpenLoom): void {
  const node = loom.current.peek()
  const row = document.querySelector(`[role=treeitem][data-node="${node}"]`)?.getBoundingClientRect()
  const box = document.querySelector('[role=tree]')?.getBoundingClientRect()
  if (row && box && row.height && row.bottom > box.top && row.top < box.bottom) {
    menu.value = { node, x: Math.max(row.left + 40, box.left), y: row.bottom }
    return
  }
  // On the map, or with the tree hidden: next to the actions at the end of the text.
  const end = document.querySelector('.reading .action-bar')?.getBoundingClientRect()
  menu.value = { node, x: end?.left ?? innerWidth / 2, y: Math.min(end?.top ?? innerHeight, innerHeight) / 2 }
}
