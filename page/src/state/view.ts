/** How the page looks to this person: remembered by the browser, never part of a loom. */
import { signal } from '@preact/signals'
import { HEAT_MODES, type HeatMode } from '../model/heat'
import { remembered } from './kept'

export const theme = remembered<'system' | 'light' | 'dark'>('theme', 'system')
/** Of the text that one reads. */
export const TEXT_SIZES = ['small', 'normal', 'large', 'larger'] as const
export const textSize = remembered<(typeof TEXT_SIZES)[number]>('textSize', 'normal')
export const TEXT_WIDTHS = ['narrow', 'normal', 'wide'] as const
export const textWidth = remembered<(typeof TEXT_WIDTHS)[number]>('textWidth', 'normal')
export const heatMode = remembered<HeatMode>('heat', 'off')
export const panes = remembered('panes', {
  left: 288,
  /** The left pane's width while it shows the map. */
  map: 520,
  right: 320,
  hasLeft: true,
  hasRight: true,
})
export const treeView = remembered<'outline' | 'map'>('treeView', 'outline')
/** `run` is there while there is a search to look at. */
export type InspectorTab = 'generate' | 'tokens' | 'node' | 'loom' | 'run'
export const inspectorTab = remembered<InspectorTab>('inspector', 'generate')
/** Which pane a narrow screen shows. */
export const narrowTab = signal<'tree' | 'text' | 'inspector'>('text')
/** Where bare keys go: `tree` has them; in `text` somebody types. */
export const zone = signal<'tree' | 'text'>('tree')
export type Overlay = 'help' | 'palette' | 'export' | 'import' | 'looms' | 'models' | 'run' | 'gauge' | 'look'
export const overlay = signal<Overlay | null>(null)
export const notesSeen = remembered<string[]>('notes', [])

/** Show a tab of the inspector, wherever that is now. */
export function inspect(tab: InspectorTab): void {
  inspectorTab.value = tab
  narrowTab.value = 'inspector'
  if (!panes.peek().hasRight) panes.value = { ...panes.peek(), hasRight: true }
}

export function cycleHeat(): void {
  heatMode.value = HEAT_MODES[(HEAT_MODES.indexOf(heatMode.peek()) + 1) % HEAT_MODES.length]!
}
