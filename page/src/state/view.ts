/** How the page looks to this person: remembered by the browser, never part of a loom. */
import { signal } from '@preact/signals'
import { HEAT_MODES, type HeatMode } from '../model/heat'
import { ORDERS, type Order } from '../model/sibling_order'
import { isString, listOf, oneOf, remembered, sharedByTabs } from './storage'

export const THEMES = ['system', 'light', 'dark'] as const
export const theme = sharedByTabs('theme', 'system', oneOf<(typeof THEMES)[number]>(THEMES, 'system'))
/** Of the text that one reads. */
export const TEXT_SIZES = ['small', 'normal', 'large', 'larger'] as const
export const textSize = sharedByTabs(
  'textSize',
  'normal',
  oneOf<(typeof TEXT_SIZES)[number]>(TEXT_SIZES, 'normal'),
)
export const TEXT_WIDTHS = ['narrow', 'normal', 'wide'] as const
export const textWidth = sharedByTabs(
  'textWidth',
  'normal',
  oneOf<(typeof TEXT_WIDTHS)[number]>(TEXT_WIDTHS, 'normal'),
)
export const heatMode = remembered('heat', 'off', oneOf<HeatMode>(HEAT_MODES, 'off'))
/** Show texts as Markdown: by default in chats only. */
const markdown = remembered('markdown', { chats: true, texts: false }, (kept) => {
  const { chats, texts } = (kept ?? {}) as Record<string, unknown>
  return { chats: chats !== false, texts: texts === true }
})
export const showsMarkdown = (isChat: boolean): boolean =>
  isChat ? markdown.value.chats : markdown.value.texts
export function toggleMarkdown(isChat: boolean): void {
  const kind = isChat ? 'chats' : 'texts'
  markdown.value = { ...markdown.peek(), [kind]: !markdown.peek()[kind] }
}
export const panes = remembered('panes', {
  left: 288,
  /** The left pane's width while it shows the map. */
  map: 520,
  right: 320,
  hasLeft: true,
  hasRight: true,
})
const ORDER_NAMES = Object.keys(ORDERS) as Order[]
/** How siblings are sorted in every view of the tree. */
export const siblingOrder = remembered('siblingOrder', 'grown', oneOf<Order>(ORDER_NAMES, 'grown'))
const TREE_VIEWS = ['outline', 'map'] as const
export const treeView = remembered(
  'treeView',
  'outline',
  oneOf<(typeof TREE_VIEWS)[number]>(TREE_VIEWS, 'outline'),
)
/** `run` is there while there is a search to look at. */
const INSPECTOR_TABS = ['generate', 'tokens', 'node', 'loom', 'run'] as const
export type InspectorTab = (typeof INSPECTOR_TABS)[number]
export const inspectorTab = remembered(
  'inspector',
  'generate',
  oneOf<InspectorTab>(INSPECTOR_TABS, 'generate'),
)
export const showsMoreSamplers = remembered('moreSamplers', false)
/** The pane that a narrow screen shows. */
export const narrowTab = signal<'tree' | 'text' | 'inspector'>('text')
/** The target of bare keys: the tree, or a text field. */
export const zone = signal<'tree' | 'text'>('tree')
export type Overlay =
  | 'help'
  | 'palette'
  | 'export'
  | 'import'
  | 'looms'
  | 'models'
  | 'run'
  | 'gauge'
  | 'look'
  | 'compare'
  | 'grow-with'
export const overlay = signal<Overlay | null>(null)
/** The dialogs that are open, the topmost last. Keys and clicks outside the topmost one do nothing. */
export const dialogs = signal<readonly symbol[]>([])
export const dismissedHints = sharedByTabs('notes', [], listOf(isString))

/** Show a tab of the inspector, wherever that is now. */
export function inspect(tab: InspectorTab): void {
  inspectorTab.value = tab
  narrowTab.value = 'inspector'
  if (!panes.peek().hasRight) panes.value = { ...panes.peek(), hasRight: true }
}

/** Show the tree's pane, wherever that is now. */
export function showTree(): void {
  narrowTab.value = 'tree'
  if (!panes.peek().hasLeft) panes.value = { ...panes.peek(), hasLeft: true }
}

export function cycleHeat(): void {
  heatMode.value = HEAT_MODES[(HEAT_MODES.indexOf(heatMode.peek()) + 1) % HEAT_MODES.length]!
}
