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

type Rgb = readonly [number, number, number]
const STEPS = 6

/** The theme's colours: likely nodes are as the lines, unlikely ones warm; scores and ages in the accent. */
export function coloursOf(element: Element, tint: Tint): Colours {
  const style = getComputedStyle(element)
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim()
  const heat = read('heat').split(/\s+/).map(Number) as unknown as Rgb
  const strong = tint === 'probability' ? heat : rgb(read('accent'))
  const faint = between(rgb(read('line')), rgb(read('muted')), 0.35)
  const ramp = Array.from({ length: STEPS }, (_, i) => css(between(faint, strong, i / (STEPS - 1))))
  return {
    bg: read('bg'),
    line: read('line'),
    text: read('text'),
    muted: read('muted'),
    accent: read('accent'),
    hit: css(heat),
    ramp,
  }
}

function rgb(hex: string): Rgb {
  const value = Number.parseInt(hex.slice(1), 16)
  return [value >> 16, (value >> 8) & 255, value & 255]
}
const css = (colour: Rgb) => `rgb(${colour.join(' ')})`
const between = (from: Rgb, to: Rgb, part: number): Rgb => [
  Math.round(from[0] + (to[0] - from[0]) * part),
  Math.round(from[1] + (to[1] - from[1]) * part),
  Math.round(from[2] + (to[2] - from[2]) * part),
]
