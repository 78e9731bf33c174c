/** The map of a tree: the positions of its nodes, which of them are visible, and their tints. */
import { hierarchy, tree as tidy } from 'd3-hierarchy'
import { meanP } from './label'
import type { LoomTree } from './tree'

export interface Place {
  node: number
  parent: Place | null
  depth: number
  /** From its left end, at its middle. */
  x: number
  y: number
  /** The bar's length: by how many tokens it has. */
  length: number
  /** Its outermost children. */
  first: Place | null
  last: Place | null
}

/** Units of the map: a column a level, a line a node; a unit is a pixel at scale 1. */
export const COLUMN = 132
export const LINE = 28
export const LONGEST = 104
const SHORTEST = 4
const FULL = 128 // tokens of the longest bar

export interface Box {
  x0: number
  y0: number
  x1: number
  y1: number
}
/** The position of the map on the screen, in pixels. */
export interface View {
  /** Pixels per unit, down. */
  scale: number
  /** Pixels per unit, across. More than `scale` if a tree of thousands of lines is shown from far away. */
  across: number
  /** The map's origin. */
  x: number
  y: number
}

export class TreeMap {
  readonly places = new Map<number, Place>()
  /** By level; each from top to bottom. */
  readonly levels: Place[][] = []
  readonly box: Box = { x0: 0, y0: 0, x1: LONGEST, y1: 0 }

  /** Cost: O(nodes). */
  constructor(tree: LoomTree, top: number) {
    if (!tree.get(top)) return
    const root = hierarchy(top, (each) => tree.children(each))
    tidy<number>()
      .nodeSize([LINE, COLUMN])
      .separation((a, b) => (a.parent === b.parent ? 1 : 1.4))(root)
    // Parents come first.
    for (const entry of root) {
      const { data: node, depth } = entry
      const parent = entry.parent ? this.places.get(entry.parent.data)! : null
      const length = barLength(tree.get(node)!.n_tokens)
      const place: Place = { node, parent, depth, x: entry.y!, y: entry.x!, length, first: null, last: null }
      if (parent) {
        parent.first ??= place
        parent.last = place
      }
      this.places.set(node, place)
      const level = this.levels[depth]
      if (level) level.push(place)
      else this.levels[depth] = [place]
      this.box.x1 = Math.max(this.box.x1, place.x + LONGEST)
      this.box.y0 = Math.min(this.box.y0, place.y)
      this.box.y1 = Math.max(this.box.y1, place.y)
    }
    for (const level of this.levels) level.sort((a, b) => a.y - b.y)
    this.box.y0 -= LINE / 2
    this.box.y1 += LINE / 2
  }

  /** Places in a box, level by level. Cost: O(levels · log nodes + results). */
  *within(box: Box): Generator<Place> {
    const first = Math.max(0, Math.floor((box.x0 - LONGEST) / COLUMN))
    const last = Math.min(this.levels.length - 1, Math.floor(box.x1 / COLUMN))
    for (let depth = first; depth <= last; depth++) {
      const level = this.levels[depth]!
      for (let i = lowest(level, box.y0 - LINE); i < level.length; i++) {
        const place = level[i]!
        if (place.y > box.y1 + LINE) break
        yield place
      }
    }
  }

  /** The node at a point, or near it by so many units. */
  at(x: number, y: number, near: number): Place | null {
    let best: Place | null = null
    let distance = near
    const box = { x0: x - near, y0: y - near, x1: x + near, y1: y + near }
    for (const place of this.within(box)) {
      const gap = Math.max(place.x - x, x - place.x - Math.max(place.length, LONGEST), 0)
      const far = Math.hypot(gap, place.y - y)
      if (far <= distance) {
        best = place
        distance = far
      }
    }
    return best
  }
}

/** How long a node's bar is: as the root of its tokens. */
export function barLength(nTokens: number): number {
  return SHORTEST + (LONGEST - SHORTEST) * Math.min(1, Math.sqrt(nTokens / FULL))
}

/** The index of the first of a level that is not above y. */
function lowest(level: readonly Place[], y: number): number {
  let [low, high] = [0, level.length]
  while (low < high) {
    const mid = (low + high) >> 1
    if (level[mid]!.y < y) low = mid + 1
    else high = mid
  }
  return low
}

// Views

const SMALLEST = 0.001

/** The view that shows a box with a margin of so many pixels. */
export function fitAll(box: Box, width: number, height: number, margin = 16): View {
  const across = Math.min(1, Math.max(SMALLEST, (width - 2 * margin) / (box.x1 - box.x0)))
  const high = Math.max(SMALLEST, (height - 2 * margin) / Math.max(1, box.y1 - box.y0))
  const scale = Math.min(across, high)
  return {
    scale,
    across,
    x: (width - across * (box.x0 + box.x1)) / 2,
    y: (height - scale * (box.y0 + box.y1)) / 2,
  }
}

/** The part of the map that a screen of so many pixels shows. */
export function visibleBox(view: View, width: number, height: number): Box {
  return {
    x0: -view.x / view.across,
    y0: -view.y / view.scale,
    x1: (width - view.x) / view.across,
    y1: (height - view.y) / view.scale,
  }
}

// Tints

export const TINTS = ['probability', 'score', 'age'] as const
export type Tint = (typeof TINTS)[number]

/** The strength of a node's tint, 0 to 1; null: there is no value. */
export function tints(tree: LoomTree, by: Tint): (node: number) => number | null {
  if (by === 'probability') {
    return (number) => {
      const p = meanP(tree.get(number)!)
      return p === null ? null : 1 - p
    }
  }
  const value = (number: number): number | null => {
    const node = tree.get(number)!
    if (by === 'age') return node.node
    return typeof node.score === 'number' ? node.score : null
  }
  let [low, high] = [Infinity, -Infinity]
  for (const number of tree.nodes.keys()) {
    const one = value(number)
    if (one === null) continue
    low = Math.min(low, one)
    high = Math.max(high, one)
  }
  return (number) => {
    const one = value(number)
    return one === null ? null : high > low ? (one - low) / (high - low) : 1
  }
}
