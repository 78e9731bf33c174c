/** Every key of the page, once: what listens, the help, the palette and the tooltips read this. */

import type { Signal } from '@preact/signals'
import { ROOT } from '../model/tree'
import * as act from './actions'
import { cardNeedsCtrl, scoreAll, showsSpecial } from './reading'
import { cannotGrow, open } from './session'
import { applyPreset, limits, presets, set, settings } from './settings'
import { toast } from './toasts'
import { ways } from './trouble'
import * as view from './view'

export const isMac = /Mac|iPhone|iPad/.test(navigator.platform)

export interface Binding {
  id: string
  group: 'Grow' | 'Move' | 'Write' | 'Shape' | 'Look' | 'Page'
  label: string
  /** Keys while the tree has the focus, and while somebody types. As "Mod+Shift+Enter". */
  tree?: string[]
  text?: string[]
  /** Whether it can be done now; what cannot is dimmed in the palette. */
  can?: () => boolean
  /** Why it cannot, where that is worth a word. */
  why?: () => string | null
  run: () => unknown
}

const here = () => open.peek()
const at = () => here()?.current.peek() ?? ROOT
const has = () => here() !== null
const canGrow = () => has() && cannotGrow.peek() === null
const whyNot = () => cannotGrow.peek()
const isBelowRoot = () => has() && at() !== ROOT
const hasSelected = () => (here()?.selected.peek().size ?? 0) > 0

function go(to: number | null | undefined): void {
  if (to !== null && to !== undefined) here()?.go(to)
}
function sibling(by: 1 | -1): void {
  const siblings = here()?.tree.siblings(at()) ?? []
  go(siblings[siblings.indexOf(at()) + by])
}
function branchPoint(direction: 1 | -1): void {
  const loom = here()
  if (loom)
    go(
      loom.tree.branchPoint(
        at(),
        direction,
        (children) => children.find((each) => each === loom.childOf(loom.tree.parent(each)!)) ?? children[0]!,
      ),
    )
}
function nextBookmark(by: 1 | -1): void {
  const marks = here()?.bookmarks.peek() ?? []
  if (!marks.length) return
  const order = [...here()!.tree.preorder()]
  const place = order.indexOf(at())
  const places = marks.map((each) => order.indexOf(each))
  const next = by > 0 ? places.find((each) => each > place) : places.findLast((each) => each < place)
  go(order[next ?? (by > 0 ? places[0]! : places[places.length - 1]!)])
}

/** What other parts of the page take over while they have something open: editor, card, search. */
export const handlers = {
  edit: (_inPlace: boolean): void => {},
  writeChild: (): void => {},
  splitHere: (_andChild: boolean): void => {},
  clipHere: (_drops: boolean): void => {},
  alternative: (_by: 1 | -1): void => {},
  takeAlternative: (): boolean => false,
  search: (): void => {},
  hit: (_by: 1 | -1): boolean => false,
  fit: (_all: boolean): void => {},
  closeTop: (): boolean => false,
  /** Do it to the nodes that are selected; false where none are. */
  withSelected: (_verb: 'grow' | 'remove'): boolean => false,
  select: (_what: 'here' | 'leaves' | 'bookmarks'): void => {},
  menu: (): void => {},
  move: (): void => {},
  showBookmarks: (): void => {},
  nextMode: (): void => {},
  /** A digit, before it means a child. Returns whether it was taken. */
  digit: (_k: number): boolean => false,
}

/** What Escape closes, the one that was opened last first; each says whether it had something open. */
export const closers: (() => boolean)[] = []

const show = (what: view.Overlay) => {
  view.overlay.value = what
}
const pane = (which: 'hasLeft' | 'hasRight') => {
  const now = view.panes.peek()
  view.panes.value = { ...now, [which]: !now[which] }
}
const toggle = (setting: Signal<boolean>) => {
  setting.value = !setting.peek()
}
const more = (by: number) =>
  set({ n: Math.max(1, Math.min(limits.peek()?.n ?? Infinity, settings.peek().n + by)) })
const preset = (k: number) => {
  const found = presets.peek()[k - 1]
  if (found) applyPreset(found)
}

// biome-ignore format: a table is read by lines
export const bindings: Binding[] = [
  { id: 'grow', group: 'Grow', label: 'Grow branches', tree: ['g', 'Space'], text: ['Mod+Enter'], can: canGrow, why: whyNot, run: () => handlers.withSelected('grow') || act.grow(at()) },
  { id: 'siblings', group: 'Grow', label: 'Grow more siblings', tree: ['G'], text: ['Mod+Shift+Enter'], can: canGrow, why: whyNot, run: () => act.grow(here()?.tree.parent(at()) ?? ROOT) },
  { id: 'n-more', group: 'Grow', label: 'One branch more', tree: ['Alt+ArrowUp'], run: () => more(1) },
  { id: 'n-fewer', group: 'Grow', label: 'One branch fewer', tree: ['Alt+ArrowDown'], run: () => more(-1) },
  { id: 'preset-1', group: 'Grow', label: 'First preset of settings', tree: ['Alt+1'], text: ['Alt+1'], can: () => presets.peek().length > 0, run: () => preset(1) },
  { id: 'preset-2', group: 'Grow', label: 'Second preset', tree: ['Alt+2'], text: ['Alt+2'], can: () => presets.peek().length > 1, run: () => preset(2) },
  { id: 'preset-3', group: 'Grow', label: 'Third preset', tree: ['Alt+3'], text: ['Alt+3'], can: () => presets.peek().length > 2, run: () => preset(3) },
  { id: 'preset-4', group: 'Grow', label: 'Fourth preset', tree: ['Alt+4'], text: ['Alt+4'], can: () => presets.peek().length > 3, run: () => preset(4) },
  { id: 'preset-5', group: 'Grow', label: 'Fifth preset', tree: ['Alt+5'], text: ['Alt+5'], can: () => presets.peek().length > 4, run: () => preset(5) },
  { id: 'next-token', group: 'Grow', label: 'One token at a time', tree: ['t'], can: canGrow, why: whyNot, run: () => handlers.nextMode() },
  { id: 'run', group: 'Grow', label: 'Search for an answer', tree: ['R'], can: canGrow, why: whyNot, run: () => show('run') },
  { id: 'stop', group: 'Grow', label: 'Stop this branch; twice: all', tree: ['Escape'], run: stop },
  { id: 'stop-all', group: 'Grow', label: 'Stop all', can: has, run: () => act.stopAll() },
  { id: 'parent', group: 'Move', label: 'To the parent', tree: ['ArrowLeft', 'h'], text: ['Alt+ArrowLeft'], can: isBelowRoot, run: () => go(here()?.tree.parent(at())) },
  { id: 'child', group: 'Move', label: 'To the child visited last', tree: ['ArrowRight', 'l'], text: ['Alt+ArrowRight'], can: has, run: () => go(here()?.childOf(at())) },
  { id: 'previous', group: 'Move', label: 'To the sibling before', tree: ['ArrowUp', 'k'], text: ['Alt+ArrowUp'], can: has, run: () => sibling(-1) },
  { id: 'next', group: 'Move', label: 'To the next sibling', tree: ['ArrowDown', 'j'], text: ['Alt+ArrowDown'], can: has, run: () => sibling(1) },
  { id: 'branch-up', group: 'Move', label: 'To the branch point above', tree: ['['], text: ['Alt+['], can: has, run: () => branchPoint(-1) },
  { id: 'branch-down', group: 'Move', label: 'To the branch point below', tree: [']'], text: ['Alt+]'], can: has, run: () => branchPoint(1) },
  { id: 'root', group: 'Move', label: 'To the prompt', tree: ['r'], can: has, run: () => go(here()?.top) },
  { id: 'back', group: 'Move', label: 'To where you were', tree: ['`'], can: has, run: () => go(here()?.previous) },
  { id: 'bookmark-next', group: 'Move', label: 'To the next bookmark', tree: [';'], can: has, run: () => nextBookmark(1) },
  { id: 'bookmark-previous', group: 'Move', label: 'To the bookmark before', tree: [':'], can: has, run: () => nextBookmark(-1) },
  { id: 'edit', group: 'Write', label: 'Edit, as a sibling', tree: ['e'], can: has, run: () => handlers.edit(false) },
  { id: 'edit-in-place', group: 'Write', label: 'Edit in place', tree: ['E'], can: has, run: () => handlers.edit(true) },
  { id: 'write', group: 'Write', label: 'Write a child', tree: ['Enter'], can: has, run: () => handlers.takeAlternative() || handlers.writeChild() },
  { id: 'undo', group: 'Write', label: 'Undo', tree: ['u', 'Mod+z'], can: has, run: () => act.undo() },
  { id: 'redo', group: 'Write', label: 'Do again', tree: ['Mod+Shift+z', 'Mod+y'], can: has, run: () => act.redo() },
  { id: 'split', group: 'Shape', label: 'Split at the cursor', tree: ['s'], text: ['Alt+s'], can: has, run: () => handlers.splitHere(false) },
  { id: 'split-child', group: 'Shape', label: 'Split, and write a child', tree: ['c'], text: ['Alt+c'], can: has, run: () => handlers.splitHere(true) },
  { id: 'clip', group: 'Shape', label: 'Cut off after the cursor', tree: ['C'], can: has, run: () => handlers.clipHere(false) },
  { id: 'clip-drop', group: 'Shape', label: 'Cut off after the cursor, and drop it', can: has, run: () => handlers.clipHere(true) },
  { id: 'merge', group: 'Shape', label: 'Merge with the parent', tree: ['m'], text: ['Alt+m'], can: isBelowRoot, run: () => act.merge(at()) },
  { id: 'remove', group: 'Shape', label: 'Remove', tree: ['Delete', 'Backspace'], text: ['Alt+Backspace'], can: () => isBelowRoot() || hasSelected(), run: () => handlers.withSelected('remove') || act.remove(at()) },
  { id: 'remove-children', group: 'Shape', label: 'Remove the children', tree: ['x'], can: has, run: () => act.remove(at(), 'children') },
  { id: 'remove-siblings', group: 'Shape', label: 'Remove the siblings', tree: ['X'], can: isBelowRoot, run: () => act.remove(at(), 'siblings') },
  { id: 'keep-path', group: 'Shape', label: 'Keep only this path', can: isBelowRoot, run: () => act.remove(at(), 'others') },
  { id: 'move', group: 'Shape', label: 'Move below another node', tree: ['y'], can: isBelowRoot, run: () => handlers.move() },
  { id: 'bookmark', group: 'Shape', label: 'Bookmark', tree: ['b'], text: ['Mod+b'], can: has, run: () => act.bookmark(at()) },
  { id: 'hoist', group: 'Look', label: 'Show only this subtree', tree: ['z'], can: has, run: () => act.hoist(at()) },
  { id: 'unhoist', group: 'Look', label: 'Show what is around it again', tree: ['Z'], can: () => (here()?.hoisted.peek().length ?? 0) > 0, run: () => act.unhoist() },
  { id: 'collapse', group: 'Look', label: 'Fold this subtree', tree: ['-'], can: has, run: () => act.collapse([at()], !here()!.collapsed.peek().has(at())) },
  { id: 'collapse-others', group: 'Look', label: 'Fold everything else', tree: ['_'], can: has, run: collapseOthers },
  { id: 'expand', group: 'Look', label: 'Unfold everything', tree: ['+'], can: has, run: () => act.collapse([...(here()?.collapsed.peek() ?? [])], false) },
  { id: 'heat', group: 'Look', label: 'Heat: off, probability, entropy, rank', tree: ['p'], text: ['Alt+p'], can: has, run: view.cycleHeat },
  { id: 'alternative', group: 'Look', label: 'Next token of the text', tree: ['.'], text: ['Alt+.'], can: has, run: () => handlers.alternative(1) },
  { id: 'alternative-back', group: 'Look', label: 'Token before', tree: [','], text: ['Alt+,'], can: has, run: () => handlers.alternative(-1) },
  { id: 'score', group: 'Look', label: 'Score what was written', can: has, run: () => { const loom = here(); if (loom) scoreAll(loom) } },
  { id: 'special', group: 'Look', label: 'Show special tokens, or hide them', can: has, run: () => toggle(showsSpecial) },
  { id: 'card-ctrl', group: 'Look', label: 'Token card: on resting, or only with Ctrl held', run: () => toggle(cardNeedsCtrl) },
  { id: 'select', group: 'Look', label: 'Select, or not any more', tree: ['a'], can: has, run: () => handlers.select('here') },
  { id: 'select-leaves', group: 'Look', label: 'Select all leaves', tree: ['A'], can: has, run: () => handlers.select('leaves') },
  { id: 'select-bookmarks', group: 'Look', label: 'Select all bookmarks', can: has, run: () => handlers.select('bookmarks') },
  { id: 'bookmarks', group: 'Look', label: 'Bookmarks', tree: ['B'], can: has, run: () => handlers.showBookmarks() },
  { id: 'menu', group: 'Look', label: 'What can be done with this node', tree: ['Shift+F10', 'ContextMenu'], can: has, run: () => handlers.menu() },
  { id: 'map', group: 'Look', label: 'Outline or map', tree: ['v'], can: has, run: () => { view.treeView.value = view.treeView.peek() === 'map' ? 'outline' : 'map' } },
  { id: 'fit', group: 'Look', label: 'Map: fit the cursor', tree: ['0'], can: has, run: () => handlers.fit(false) },
  { id: 'fit-all', group: 'Look', label: 'Map: fit all', tree: ['9'], can: has, run: () => handlers.fit(true) },
  { id: 'search', group: 'Look', label: 'Search', tree: ['/'], text: ['Mod+Shift+f'], can: has, run: () => handlers.search() },
  { id: 'hit-next', group: 'Look', label: 'Next hit of the search', tree: ['n'], can: has, run: () => handlers.hit(1) },
  { id: 'hit-previous', group: 'Look', label: 'Hit before', tree: ['N'], can: has, run: () => handlers.hit(-1) },
  { id: 'left', group: 'Page', label: 'Show or hide the tree', tree: ['Mod+['], run: () => pane('hasLeft') },
  { id: 'right', group: 'Page', label: 'Show or hide the inspector', tree: ['Mod+]'], run: () => pane('hasRight') },
  { id: 'looms', group: 'Page', label: 'Looms', tree: ['o'], run: () => show('looms') },
  { id: 'new', group: 'Page', label: 'New loom', tree: ['Alt+n'], run: () => { location.hash = '' } },
  { id: 'models', group: 'Page', label: 'Models', tree: ['M'], run: () => show('models') },
  { id: 'export', group: 'Page', label: 'Export', tree: ['Mod+s'], can: has, run: () => show('export') },
  { id: 'import', group: 'Page', label: 'Import', tree: ['i'], run: () => show('import') },
  { id: 'gauge', group: 'Page', label: 'Memory: what KV takes and has saved', can: has, run: () => show('gauge') },
  { id: 'look', group: 'Page', label: 'Theme, text size and width', tree: ['T'], run: () => show('look') },
  { id: 'palette', group: 'Page', label: 'All commands', tree: ['Mod+k'], text: ['Mod+k'], run: () => show('palette') },
  { id: 'help', group: 'Page', label: 'Keys', tree: ['?'], text: ['F1'], run: () => show('help') },
]

ways.clip = () => void run('clip')

const byId = new Map(bindings.map((each) => [each.id, each]))
export const run = (id: string) => byId.get(id)?.run()

function collapseOthers(): void {
  const loom = here()
  if (!loom) return
  const path = new Set(loom.tree.path(at()))
  const others = [...path]
    .flatMap((each) => loom.tree.children(each))
    .filter((each) => !path.has(each) && loom.tree.children(each).length)
  act.collapse(others, true)
}

let escapedAt = -Infinity
/** Close what is open above; else stop the branch here, and a second time everything. */
function stop(): void {
  if (handlers.closeTop() || closers.findLast((close) => close())) return
  const now = performance.now()
  const lane = here()?.lanes.peek().get(at())
  if (now - escapedAt < 600 || !lane || lane.isOver) act.stopAll()
  else act.stopBranch(at())
  escapedAt = now
}

/** The name of a key event, as the table writes it. */
export function keyOf(event: KeyboardEvent): string {
  const isMod = isMac ? event.metaKey : event.ctrlKey
  const letter =
    event.altKey && /^(Key|Digit|Bracket|Comma|Period)/.test(event.code) ? plain(event.code) : event.key
  const key = letter === ' ' ? 'Space' : letter
  const isShifted = event.shiftKey && (key.length > 1 || isMod || event.altKey)
  const name = isShifted || isMod ? (key.length === 1 ? key.toLowerCase() : key) : key
  return `${isMod ? 'Mod+' : ''}${event.altKey ? 'Alt+' : ''}${isShifted ? 'Shift+' : ''}${name}`
}

/** What Option types on macOS is a symbol; the key is what counts. */
function plain(code: string): string {
  const named: Record<string, string> = { BracketLeft: '[', BracketRight: ']', Comma: ',', Period: '.' }
  return named[code] ?? code.replace(/^(Key|Digit)/, '').toLowerCase()
}

/** A key as people read it. */
export function shown(key: string): string {
  const names: Record<string, string> = {
    Mod: isMac ? '⌘' : 'Ctrl',
    Alt: isMac ? '⌥' : 'Alt',
    Shift: isMac ? '⇧' : 'Shift',
    ArrowLeft: '←',
    ArrowRight: '→',
    ArrowUp: '↑',
    ArrowDown: '↓',
    Escape: 'Esc',
    Delete: 'Del',
    Backspace: '⌫',
    Enter: '⏎',
    ContextMenu: 'Menu',
  }
  if (key.length === 1 && key !== key.toLowerCase()) return `${names['Shift']}${isMac ? '' : '+'}${key}`
  return (
    key
      .split('+')
      .filter(Boolean)
      .map((each) => names[each] ?? (each.length === 1 ? each.toUpperCase() : each))
      .join(isMac ? '' : '+') || key
  )
}

/** The first key of a command, for a tooltip; "" where it has none. */
export function keyFor(id: string): string {
  const key = byId.get(id)?.tree?.[0] ?? byId.get(id)?.text?.[0]
  return key ? shown(key) : ''
}

const isTyping = (target: EventTarget | null) =>
  target instanceof HTMLElement &&
  target.matches(
    'input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]',
  )

/** Listen to the whole page. Returns what ends it. */
export function listen(): () => void {
  const onKey = (event: KeyboardEvent) => {
    if (event.defaultPrevented || event.isComposing) return
    const typing = isTyping(event.target)
    const dialog = event.target instanceof Element && event.target.closest('[role=dialog]')
    if (dialog) return
    const key = keyOf(event)
    // A button that has the focus is pressed by these, as everywhere.
    if (
      !typing &&
      (key === 'Enter' || key === 'Space') &&
      event.target instanceof Element &&
      event.target.closest('button, a, [role=button], summary')
    )
      return
    const isChild = /^[1-9]$/.test(key) && !(key === '9' && view.treeView.peek() === 'map')
    if (!typing && isChild && (handlers.digit(Number(key)) || pickChild(Number(key)))) {
      event.preventDefault()
      return
    }
    const found = bindings.find((each) => (typing ? each.text : each.tree)?.includes(key))
    if (!found) return
    event.preventDefault()
    if (found.can?.() ?? true) found.run()
    else if (found.why?.()) toast(found.why()!)
  }
  const onFocus = () => {
    view.zone.value = isTyping(document.activeElement) ? 'text' : 'tree'
  }
  addEventListener('keydown', onKey)
  addEventListener('focusin', onFocus)
  addEventListener('focusout', onFocus)
  return () => {
    removeEventListener('keydown', onKey)
    removeEventListener('focusin', onFocus)
    removeEventListener('focusout', onFocus)
  }
}

function pickChild(k: number): boolean {
  const child = here()?.tree.children(at())[k - 1]
  if (child === undefined) return false
  go(child)
  return true
}
