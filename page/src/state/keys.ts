/** Every key of the page, once: what listens, the help, the palette and the tooltips read this. */

import type { Signal } from '@preact/signals'
import { comparedNodes } from '../model/compare'
import { ROOT } from '../model/tree'
import * as act from './actions'
import { call } from './handlers'
import { cardNeedsCtrl, scoreAll, showsSpecial } from './reading'
import { cannotGrow, models, open } from './session'
import { applyPreset, limits, presets, set, settings } from './settings'
import { dismiss, toast } from './toasts'
import * as view from './view'

export const isMac = /Mac|iPhone|iPad/.test(navigator.platform)

export interface Binding {
  id: string
  group: 'Grow' | 'Navigate' | 'Write' | 'Structure' | 'View' | 'General'
  label: string
  /** Synonyms, for the search in the palette. */
  also?: string
  /** Keys while the tree has the focus, and while a text field has it. As "Mod+Shift+Enter". */
  tree?: string[]
  text?: string[]
  /** Return true if the action is possible now; the palette dims it otherwise. */
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
/** A step does not leave a hoisted subtree: that has its own key. */
const isBelowTop = () => has() && at() !== here()!.top
const hasCompared = () => has() && comparedNodes(here()!.tree, at(), here()!.selected.peek()).length > 1
const hasSelected = () => (here()?.selected.peek().size ?? 0) > 0

function navigate(to: number | null | undefined): void {
  if (to !== null && to !== undefined) here()?.navigate(to)
}
function sibling(by: 1 | -1): void {
  if (!isBelowTop()) return
  const siblings = here()?.tree.siblings(at()) ?? []
  navigate(siblings[siblings.indexOf(at()) + by])
}
function branchPoint(direction: 1 | -1): void {
  const loom = here()
  if (!loom) return
  const target = loom.tree.branchPoint(
    at(),
    direction,
    (children) =>
      children.find((each) => each === loom.position.childOf(loom.tree.parent(each)!)) ?? children[0]!,
  )
  if (target !== null && loom.tree.isBelow(target, loom.top)) navigate(target)
}
function nextBookmark(by: 1 | -1): void {
  const marks = here()?.bookmarks.peek() ?? []
  if (!marks.length) {
    toast(`No bookmarks yet. ${keyFor('bookmark')} bookmarks the current node.`)
    return
  }
  const order = [...here()!.tree.preorder()]
  const place = order.indexOf(at())
  const places = marks.map((each) => order.indexOf(each))
  const next = by > 0 ? places.find((each) => each > place) : places.findLast((each) => each < place)
  navigate(order[next ?? (by > 0 ? places[0]! : places[places.length - 1]!)])
}

const show = (what: view.Overlay) => {
  view.overlay.value = what
}
const pane = (which: 'hasLeft' | 'hasRight') => {
  const now = view.panes.peek()
  view.panes.value = { ...now, [which]: !now[which] }
}
/** Show a tab of the inspector, with the keys in it. */
const openTab = (tab: view.InspectorTab) => {
  view.inspect(tab)
  const fields = ':is(button, input, select, textarea):not(:disabled)'
  setTimeout(() => document.querySelector<HTMLElement>(`#inspector-panel ${fields}`)?.focus())
}
const toggle = (setting: Signal<boolean>) => {
  setting.value = !setting.peek()
}
const more = (by: number) =>
  set({ n: Math.max(1, Math.min(limits.peek()?.n ?? Infinity, settings.peek().n + by)) })
const preset = (k: number) => {
  const chosen = presets.peek()[k - 1]
  if (!chosen) return
  applyPreset(chosen)
  toast(`Settings: ${chosen.name}`)
}

// biome-ignore format: a table is read by lines
export const bindings: Binding[] = [
  { id: 'grow', group: 'Grow', label: 'Grow branches', tree: ['g', 'Space'], text: ['Mod+Enter'], also: 'generate continue complete', can: canGrow, why: whyNot, run: () => call('withSelected', 'grow') || act.grow(at()) },
  { id: 'siblings', group: 'Grow', label: 'Grow more siblings', tree: ['G'], text: ['Mod+Shift+Enter'], also: 'regenerate more', can: canGrow, why: whyNot, run: () => act.grow(here()?.tree.parent(at()) ?? ROOT) },
  { id: 'grow-with', group: 'Grow', label: 'Grow with other models', tree: ['w'], also: 'switch model several side by side', can: () => canGrow() && models.peek().length > 1, why: whyNot, run: () => show('grow-with') },
  { id: 'continue', group: 'Grow', label: 'Continue: one branch, until it ends', tree: ['W'], also: 'generate complete end', can: canGrow, why: whyNot, run: () => act.continueToEnd(at()) },
  { id: 'n-more', group: 'Grow', label: 'Number of branches: one more', tree: ['Alt+ArrowUp'], also: 'count', run: () => more(1) },
  { id: 'n-fewer', group: 'Grow', label: 'Number of branches: one fewer', tree: ['Alt+ArrowDown'], also: 'count less', run: () => more(-1) },
  { id: 'preset-1', group: 'Grow', label: 'Settings preset 1', tree: ['Alt+1'], text: ['Alt+1'], can: () => presets.peek().length > 0, run: () => preset(1) },
  { id: 'preset-2', group: 'Grow', label: 'Settings preset 2', tree: ['Alt+2'], text: ['Alt+2'], can: () => presets.peek().length > 1, run: () => preset(2) },
  { id: 'preset-3', group: 'Grow', label: 'Settings preset 3', tree: ['Alt+3'], text: ['Alt+3'], can: () => presets.peek().length > 2, run: () => preset(3) },
  { id: 'preset-4', group: 'Grow', label: 'Settings preset 4', tree: ['Alt+4'], text: ['Alt+4'], can: () => presets.peek().length > 3, run: () => preset(4) },
  { id: 'preset-5', group: 'Grow', label: 'Settings preset 5', tree: ['Alt+5'], text: ['Alt+5'], can: () => presets.peek().length > 4, run: () => preset(5) },
  { id: 'next-token', group: 'Grow', label: 'One token at a time', tree: ['t'], also: 'step sample candidates', can: canGrow, why: whyNot, run: () => call('nextMode') },
  { id: 'run', group: 'Grow', label: 'Solve: search for an answer', tree: ['R'], also: 'reasoning run beam mcts tree of thoughts', can: canGrow, why: whyNot, run: () => show('run') },
  { id: 'stop', group: 'Grow', label: 'Stop this branch (twice: all)', tree: ['Escape'], also: 'cancel abort', run: stop },
  { id: 'retry', group: 'Grow', label: 'Retry failed branches', tree: ['f'], also: 'retry try again error', can: () => canGrow() && here()!.growth.failedLanes().length > 0, why: whyNot, run: retryFailed },
  { id: 'stop-all', group: 'Grow', label: 'Stop all', also: 'cancel abort', can: has, run: () => act.stopAll() },
  { id: 'parent', group: 'Navigate', label: 'To the parent', tree: ['ArrowLeft', 'h'], text: ['Alt+ArrowLeft'], can: isBelowTop, run: () => navigate(here()?.tree.parent(at())) },
  { id: 'child', group: 'Navigate', label: 'To the last visited child', tree: ['ArrowRight', 'l'], text: ['Alt+ArrowRight'], can: has, run: () => navigate(here()?.position.childOf(at())) },
  { id: 'previous', group: 'Navigate', label: 'To the previous sibling', tree: ['ArrowUp', 'k'], text: ['Alt+ArrowUp'], can: has, run: () => sibling(-1) },
  { id: 'next', group: 'Navigate', label: 'To the next sibling', tree: ['ArrowDown', 'j'], text: ['Alt+ArrowDown'], can: has, run: () => sibling(1) },
  { id: 'branch-up', group: 'Navigate', label: 'To the branch point above', tree: ['['], text: ['Alt+['], can: has, run: () => branchPoint(-1) },
  { id: 'branch-down', group: 'Navigate', label: 'To the branch point below', tree: [']'], text: ['Alt+]'], can: has, run: () => branchPoint(1) },
  { id: 'root', group: 'Navigate', label: 'To the prompt', tree: ['r'], can: has, run: () => navigate(here()?.top) },
  { id: 'back', group: 'Navigate', label: 'Back to where you were', tree: ['`'], also: 'previous last', can: has, run: () => navigate(here()?.position.previous) },
  { id: 'bookmark-next', group: 'Navigate', label: 'To the next bookmark', tree: [';'], can: has, run: () => nextBookmark(1) },
  { id: 'bookmark-previous', group: 'Navigate', label: 'To the previous bookmark', tree: [':'], can: has, run: () => nextBookmark(-1) },
  { id: 'edit', group: 'Write', label: 'Edit as a new sibling', tree: ['e'], also: 'rewrite change', can: has, run: () => call('edit', false) },
  { id: 'edit-in-place', group: 'Write', label: 'Edit in place', tree: ['E'], also: 'rewrite change', can: has, run: () => call('edit', true) },
  { id: 'write', group: 'Write', label: 'Write a continuation', tree: ['Enter'], also: 'add reply type new', can: has, run: () => call('place') || call('takeAlternative') || call('writeChild') },
  { id: 'undo', group: 'Write', label: 'Undo', tree: ['u', 'Mod+z'], also: 'revert back', can: has, run: () => act.undo() },
  { id: 'redo', group: 'Write', label: 'Redo', tree: ['Mod+Shift+z', 'Mod+y'], also: 'again', can: has, run: () => act.redo() },
  { id: 'split', group: 'Structure', label: 'Split at the cursor', tree: ['s'], text: ['Alt+s'], can: has, run: () => call('splitHere', false) },
  { id: 'split-child', group: 'Structure', label: 'Split and write a continuation', tree: ['c'], text: ['Alt+c'], also: 'add', can: has, run: () => call('splitHere', true) },
  { id: 'clip', group: 'Structure', label: 'Cut off after the cursor', tree: ['C'], also: 'clip trim truncate', can: has, run: () => call('clipHere', false) },
  { id: 'clip-drop', group: 'Structure', label: 'Cut off and discard the text after the cursor', also: 'clip trim truncate', can: has, run: () => call('clipHere', true) },
  { id: 'merge', group: 'Structure', label: 'Merge with the parent', tree: ['m'], text: ['Alt+m'], can: isBelowRoot, run: () => act.merge(at()) },
  { id: 'remove', group: 'Structure', label: 'Remove', tree: ['Delete', 'Backspace'], text: ['Alt+Backspace'], also: 'delete prune', can: () => isBelowRoot() || hasSelected(), run: () => call('withSelected', 'remove') || act.remove(at()) },
  { id: 'remove-children', group: 'Structure', label: 'Remove the children', tree: ['x'], also: 'delete prune', can: has, run: () => act.remove(at(), 'children') },
  { id: 'remove-siblings', group: 'Structure', label: 'Remove the siblings', tree: ['X'], also: 'delete prune others', can: isBelowRoot, run: () => act.remove(at(), 'siblings') },
  { id: 'keep-path', group: 'Structure', label: 'Keep only this path', also: 'prune delete others', can: isBelowRoot, run: () => act.remove(at(), 'others') },
  { id: 'move', group: 'Structure', label: 'Move below another node', tree: ['y'], also: 'reparent', can: isBelowRoot, run: () => call('move') },
  { id: 'bookmark', group: 'Structure', label: 'Bookmark', tree: ['b'], text: ['Mod+b'], also: 'star favourite mark', can: has, run: () => act.bookmark(at()) },
  { id: 'rate-up', group: 'Structure', label: 'Rate higher', tree: ['}'], also: 'rating star like good', can: isBelowRoot, run: () => act.rerate(at(), 1) },
  { id: 'rate-down', group: 'Structure', label: 'Rate lower', tree: ['{'], also: 'rating star dislike bad', can: isBelowRoot, run: () => act.rerate(at(), -1) },
  { id: 'pin', group: 'Structure', label: 'Pin or unpin the KV cache of its path', also: 'cache keep evict', can: canGrow, why: whyNot, run: () => act.pin(at()) },
  { id: 'hoist', group: 'View', label: 'Show only this subtree', tree: ['z'], also: 'hoist focus', can: has, run: () => act.hoist(at()) },
  { id: 'unhoist', group: 'View', label: 'Leave the subtree', tree: ['Z'], also: 'unhoist', can: () => (here()?.hoisted.peek().length ?? 0) > 0, run: () => act.unhoist() },
  { id: 'collapse', group: 'View', label: 'Fold this subtree', tree: ['-'], also: 'collapse', can: has, run: () => act.collapse([at()], !here()!.collapsed.peek().has(at())) },
  { id: 'collapse-others', group: 'View', label: 'Fold everything else', tree: ['_'], also: 'collapse', can: has, run: collapseOthers },
  { id: 'expand', group: 'View', label: 'Unfold everything', tree: ['+'], also: 'expand', can: has, run: () => act.collapse([...(here()?.collapsed.peek() ?? [])], false) },
  { id: 'heat', group: 'View', label: 'Colour by probability, entropy or rank', tree: ['p'], text: ['Alt+p'], also: 'heat heatmap probabilities logprobs', can: has, run: view.cycleHeat },
  { id: 'markdown', group: 'View', label: 'Switch between Markdown and exact text', tree: ['d'], also: 'render code table maths latex format', can: has, run: () => view.toggleMarkdown(here()!.isChat) },
  { id: 'alternative', group: 'View', label: 'Next token', tree: ['.'], text: ['Alt+.'], also: 'card', can: has, run: () => call('alternative', 1) },
  { id: 'alternative-back', group: 'View', label: 'Previous token', tree: [','], text: ['Alt+,'], can: has, run: () => call('alternative', -1) },
  { id: 'score', group: 'View', label: 'Score written text', also: 'logprobs', can: has, run: () => { const loom = here(); if (loom) scoreAll(loom) } },
  { id: 'special', group: 'View', label: 'Show or hide special tokens', also: 'template', can: has, run: () => toggle(showsSpecial) },
  { id: 'card-ctrl', group: 'View', label: 'Token card: on hover, or only with Ctrl', run: () => toggle(cardNeedsCtrl) },
  { id: 'select', group: 'View', label: 'Select or deselect', tree: ['a'], can: has, run: () => call('select', 'here') },
  { id: 'select-leaves', group: 'View', label: 'Select all leaves', tree: ['A'], can: has, run: () => call('select', 'leaves') },
  { id: 'select-bookmarks', group: 'View', label: 'Select all bookmarks', can: has, run: () => call('select', 'bookmarks') },
  { id: 'bookmarks', group: 'View', label: 'Bookmarks', tree: ['B'], also: 'starred list', can: has, run: () => call('showBookmarks') },
  { id: 'menu', group: 'View', label: 'Node menu', tree: ['Shift+F10', 'ContextMenu'], also: 'context', can: has, run: () => call('menu') },
  { id: 'map', group: 'View', label: 'Switch between outline and map', tree: ['v'], also: 'view graph', can: has, run: () => { view.treeView.value = view.treeView.peek() === 'map' ? 'outline' : 'map' } },
  { id: 'compare', group: 'View', label: 'Compare branches side by side', tree: ['='], also: 'diff beam', can: hasCompared, run: () => show('compare') },
  { id: 'fit', group: 'View', label: 'Map: zoom to the current node', tree: ['0'], also: 'zoom centre', can: has, run: () => call('fit', false) },
  { id: 'fit-all', group: 'View', label: 'Map: zoom to fit all', tree: ['9'], also: 'zoom', can: has, run: () => call('fit', true) },
  { id: 'search', group: 'View', label: 'Search', tree: ['/'], text: ['Mod+Shift+f'], also: 'find filter', can: has, run: () => call('search') },
  { id: 'hit-next', group: 'View', label: 'Next search result', tree: ['n'], can: has, run: () => call('hit', 1) },
  { id: 'hit-previous', group: 'View', label: 'Previous search result', tree: ['N'], can: has, run: () => call('hit', -1) },
  { id: 'left', group: 'General', label: 'Show or hide the tree', tree: ['Mod+['], also: 'sidebar panel', run: () => pane('hasLeft') },
  { id: 'right', group: 'General', label: 'Show or hide the inspector', tree: ['Mod+]'], also: 'sidebar panel settings', run: () => pane('hasRight') },
  { id: 'looms', group: 'General', label: 'Looms', tree: ['o'], also: 'open switch files', run: () => show('looms') },
  { id: 'new', group: 'General', label: 'New loom', tree: ['Alt+n'], also: 'create begin', run: () => { location.hash = '' } },
  { id: 'models', group: 'General', label: 'Models', tree: ['M'], also: 'load unload', run: () => show('models') },
  { id: 'export', group: 'General', label: 'Export', tree: ['Mod+s'], also: 'save download copy', can: has, run: () => show('export') },
  { id: 'import', group: 'General', label: 'Import', tree: ['i'], also: 'load open upload', run: () => show('import') },
  { id: 'gauge', group: 'General', label: 'Memory: size and savings of the KV cache', also: 'kv cache', can: has, run: () => show('gauge') },
  { id: 'settings', group: 'General', label: 'Generation settings', also: 'temperature presets options', can: has, run: () => openTab('generate') },
  { id: 'node', group: 'General', label: 'Origin of this node', also: 'provenance where from copy as curl python regenerate exactly note', can: has, run: () => openTab('node') },
  { id: 'loom', group: 'General', label: 'Name, notes and history of the loom', also: 'rename remove delete', can: has, run: () => openTab('loom') },
  { id: 'look', group: 'General', label: 'Theme, text size and width', tree: ['T'], also: 'dark light font', run: () => show('look') },
  { id: 'palette', group: 'General', label: 'All commands', tree: ['Mod+k'], text: ['Mod+k'], run: () => show('palette') },
  { id: 'help', group: 'General', label: 'Keyboard shortcuts', tree: ['?'], text: ['F1'], also: 'keys help', run: () => show('help') },
]

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

/** Those that failed here, or where else some did. */
function retryFailed(): void {
  const loom = here()
  if (!loom) return
  const failed = loom.growth.failedLanes(at())
  void act.retry(failed.length ? failed : loom.growth.failedLanes())
}

const TWICE_MS = 1500
let escaped = { when: -Infinity, node: -1, hint: 0 }
/** Close what is open above; else stop the branch here, and a second time everything. */
function stop(): void {
  if (call('closeTop')) return
  const loom = here()
  if (!loom) return
  const [when, node] = [performance.now(), at()]
  const isSecond = node === escaped.node && when - escaped.when < TWICE_MS
  const lane = loom.lanes.peek().get(node)
  dismiss(escaped.hint)
  let hint = 0
  if (isSecond) act.stopAll()
  else if (lane && !lane.isOver) act.stopBranch(node)
  else if (loom.isGrowing || loom.runs.peek().some((run) => run.status === 'running'))
    hint = toast(`${shown('Escape')} again stops all branches.`)
  escaped = { when, node, hint }
}

/** The name of a key event, as the table writes it. */
export function keyOf(event: KeyboardEvent): string {
  const isMod = isMac ? event.metaKey : event.ctrlKey
  const char =
    event.altKey && /^(Key|Digit|Bracket|Comma|Period)/.test(event.code) ? plain(event.code) : event.key
  const key = char === ' ' ? 'Space' : char
  const isShifted = event.shiftKey && (key.length > 1 || isMod || event.altKey)
  const name = isShifted || isMod ? (key.length === 1 ? key.toLowerCase() : key) : key
  return `${isMod ? 'Mod+' : ''}${event.altKey ? 'Alt+' : ''}${isShifted ? 'Shift+' : ''}${name}`
}

/** On macOS, Option changes a key's character to a symbol: use the key's code. */
function plain(code: string): string {
  const named: Record<string, string> = { BracketLeft: '[', BracketRight: ']', Comma: ',', Period: '.' }
  return named[code] ?? code.replace(/^(Key|Digit)/, '').toLowerCase()
}

/** A key as people read it; the same key while they type. */
export function shown(key: string, isTyping = false): string {
  const names: Record<string, string> = {
    Mod: isMac ? '⌘' : 'Ctrl',
    Alt: isMac ? (isTyping ? '⌃⌥' : '⌥') : 'Alt',
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

const isField = (target: EventTarget | null) =>
  target instanceof HTMLElement &&
  target.matches(
    'input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]',
  )

const REPEATABLE = new Set([
  'n-more',
  'n-fewer',
  'alternative',
  'alternative-back',
  'hit-next',
  'hit-previous',
])
/** Return true if the action repeats while its key is pressed: navigation does, growth and removal do not. */
const isRepeatable = ({ id, group }: Binding) => group === 'Navigate' || REPEATABLE.has(id)

/** Return true if the focused element uses the key itself: buttons and sliders do. */
function isOwn(target: EventTarget | null, key: string): boolean {
  if (!(target instanceof Element)) return false
  if (key === 'Enter' || key === 'Space')
    return target.closest('button, a, [role=button], summary, input') !== null
  return /^(?:Arrow|Home$|End$|Page)/.test(key) && target.matches('input[type=radio], input[type=range]')
}

/** Handle the keys of the page. Returns a function that removes the listeners. */
export function listen(): () => void {
  const onKey = (event: KeyboardEvent) => {
    if (event.defaultPrevented) return
    const typing = isField(event.target)
    // The focus may have left the dialog, for example with a button that was removed.
    if (view.dialogs.peek().length) return
    // There Option moves and deletes by words, and types symbols: with Control it is a command.
    if (typing && isMac && event.altKey && !event.ctrlKey) return
    const key = keyOf(event)
    if (!typing && isOwn(event.target, key)) return
    const isChild = /^[1-9]$/.test(key) && !(key === '9' && view.treeView.peek() === 'map')
    if (!typing && isChild && event.repeat) return
    if (!typing && isChild && (call('digit', Number(key)) || pickChild(Number(key)))) {
      event.preventDefault()
      return
    }
    const binding = bindings.find((each) => (typing ? each.text : each.tree)?.includes(key))
    if (!binding) return
    const can = binding.can?.() ?? true
    const why = can ? null : (binding.why?.() ?? null)
    // A key that does nothing here scrolls, as everywhere; what a browser would do with Ctrl is not wanted.
    if (!can && why === null && !/^(?:Mod|Alt)\+/.test(key)) return
    event.preventDefault()
    if (event.repeat && !isRepeatable(binding)) return
    if (can) binding.run()
    else if (why) toast(why)
  }
  // Enter, Escape and the arrows choose what an input method writes; Safari says only 229 of the last one.
  const onComposing = (event: KeyboardEvent) => {
    if (event.isComposing || event.keyCode === 229) event.stopPropagation()
  }
  const onFocus = () => {
    view.zone.value = isField(document.activeElement) ? 'text' : 'tree'
  }
  addEventListener('keydown', onComposing, { capture: true })
  addEventListener('keydown', onKey)
  addEventListener('focusin', onFocus)
  addEventListener('focusout', onFocus)
  return () => {
    removeEventListener('keydown', onComposing, { capture: true })
    removeEventListener('keydown', onKey)
    removeEventListener('focusin', onFocus)
    removeEventListener('focusout', onFocus)
  }
}

function pickChild(k: number): boolean {
  const child = here()?.tree.children(at())[k - 1]
  if (child === undefined) return false
  navigate(child)
  return true
}
