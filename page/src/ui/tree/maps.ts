/** The layout of the open loom's map, made anew when its tree changes; and the map's colours. */
import { computed, type ReadonlySignal } from '@preact/signals'
import { type Tint, TreeMap } from '../../model/map'
import type { OpenLoom } from '../../state/loom'
import type { Colours } from './paint'

const kept = new WeakMap<OpenLoom, ReadonlySignal<TreeMap>>()

export function mapOf(loom: OpenLoom): ReadonlySignal<TreeMap> {
  let map = kept.get(loom)
  if (!map) {
    map = computed(() => {
      loom.tree.version.value
      return new TreeMap(loom.tree, loom.top)
    })
    kept.set(loom, map)
  }
  return map
}

const STEPS = 6

/** The theme's colours: likely nodes are as the lines, unlikely ones warm; scores and ages in the accent. */
export function coloursOf(element: Element, tint: Tint): Colours {
  const style = getComputedStyle(element)
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim()
  const strong = read(tint === 'probability' ? 'warm' : 'accent')
  const faint = mixed(read('muted'), read('line'), 0.35)
  return {
    bg: read('bg'),
    line: read('line'),
    text: read('text'),
    muted: read('muted'),
    accent: read('accent'),
    hit: read('warm'),
    ramp: Array.from({ length: STEPS }, (_, i) => mixed(strong, faint, i / (STEPS - 1))),
  }
}

const mixed = (colour: string, other: string, part: number) =>
  `color-mix(in srgb, ${colour} ${Math.round(100 * part)}%, ${other})`
