/** Painting the map: bars first, text where there is room for it. */
import {
  type Box,
  COLUMN,
  LINE,
  type Place,
  type Tint,
  type TreeMap,
  type View,
  visibleBox,
} from '../../model/map'
import { beginning, isRightToLeft } from '../../model/words'

export interface Colours {
  bg: string
  line: string
  text: string
  muted: string
  accent: string
  hit: string
  /** From the faintest to the strongest. */
  ramp: readonly string[]
}

/** The theme's colours: likely nodes have the colour of lines, unlikely ones are warm, scores and ages accented. */
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

export interface Scene {
  map: TreeMap
  view: View
  width: number
  height: number
  /** From the root to the current node. */
  path: readonly number[]
  marked: ReadonlySet<number>
  hits: ReadonlySet<number> | null
  hovered: number | null
  /** 0 to 1; null: no value. */
  tint: (node: number) => number | null
  words: (node: number, maxLength: number) => string
  colours: Colours
}

const STEPS = 6 // colours of the ramp
const READS = 0.55 // words from this scale on
const FONT = 12
const LEADING = 15
const BUS = 12 // units before a node where the line to its siblings runs

export function paint(pen: CanvasRenderingContext2D, scene: Scene): void {
  const { view, width, height, colours } = scene
  pen.fillStyle = colours.bg
  pen.fillRect(0, 0, width, height)
  const shown = [...thinned(scene)]
  lines(pen, scene, shown)
  thread(pen, scene)
  bars(pen, scene, shown)
  if (view.scale >= READS) words(pen, scene, shown)
  const here = scene.map.places.get(scene.path[scene.path.length - 1] ?? -1)
  if (here) knot(pen, scene, here)
}

const right = (scene: Scene, place: Place) => scene.view.x + scene.view.across * place.x
const down = (scene: Scene, place: Place) => scene.view.y + scene.view.scale * place.y

/** The visible places, without those that would cover an earlier one. */
function* thinned(scene: Scene): Generator<Place> {
  const { map, view, width, height } = scene
  let level = -1
  let last = -Infinity
  for (const place of map.within(visibleBox(view, width, height))) {
    const y = down(scene, place)
    if (place.depth === level && y - last < 0.5) continue
    level = place.depth
    last = y
    yield place
  }
}

/** From a node's bar to one of its children: along, down, and in. */
function link(pen: CanvasRenderingContext2D | Path2D, scene: Scene, parent: Place, place: Place): void {
  const k = scene.view.across
  const [x, y] = [right(scene, place), down(scene, place)]
  const from = right(scene, parent) + k * parent.length
  const [bus, top] = [x - k * BUS, down(scene, parent)]
  pen.moveTo(Math.min(from, bus), top)
  pen.lineTo(bus, top)
  const corner = Math.min(6, Math.abs(y - top), x - bus)
  if (corner < 2) {
    pen.lineTo(bus, y)
    pen.lineTo(x, y)
    return
  }
  pen.lineTo(bus, y - Math.sign(y - top) * corner)
  pen.quadraticCurveTo(bus, y, bus + corner, y)
  pen.lineTo(x, y)
}

function lines(pen: CanvasRenderingContext2D, scene: Scene, shown: readonly Place[]): void {
  const path = new Path2D()
  const [top, bottom] = [0, scene.height]
  for (const place of shown) {
    if (place.parent) link(path, scene, place.parent, place)
    // A child outside the screen can have a visible line.
    for (const child of [place.first, place.last]) {
      if (child && (down(scene, child) < top || down(scene, child) > bottom)) link(path, scene, place, child)
    }
  }
  pen.strokeStyle = scene.colours.line
  pen.lineWidth = 1
  pen.stroke(path)
}

function thread(pen: CanvasRenderingContext2D, scene: Scene): void {
  const places = scene.path.map((each) => scene.map.places.get(each)).filter((each) => each !== undefined)
  if (!places.length) return
  pen.beginPath()
  for (const [i, place] of places.entries()) {
    const parent = places[i - 1]
    if (parent) link(pen, scene, parent, place)
    if (i === places.length - 1) continue
    pen.moveTo(right(scene, place), down(scene, place))
    pen.lineTo(right(scene, place) + scene.view.across * place.length, down(scene, place))
  }
  pen.strokeStyle = scene.colours.accent
  pen.lineWidth = 2
  pen.stroke()
}

function bars(pen: CanvasRenderingContext2D, scene: Scene, shown: readonly Place[]): void {
  const { view, colours, tint } = scene
  const k = view.across
  const thick = Math.max(1, Math.min(3, view.scale * 6))
  const byColour = new Map<string, Place[]>()
  for (const place of shown) {
    const strength = tint(place.node)
    const colour = scene.hits?.has(place.node)
      ? colours.hit
      : strength === null
        ? colours.muted
        : colours.ramp[Math.min(colours.ramp.length - 1, Math.floor(strength * colours.ramp.length))]!
    const group = byColour.get(colour)
    if (group) group.push(place)
    else byColour.set(colour, [place])
  }
  for (const [colour, places] of byColour) {
    pen.fillStyle = colour
    const high = colour === colours.muted ? 1 : thick // without a value: a plain line
    for (const place of places) {
      const long = Math.max(1.5, k * place.length)
      pen.fillRect(right(scene, place), down(scene, place) - high / 2, long, high)
    }
  }
  pen.fillStyle = colours.accent
  for (const place of shown) {
    if (!scene.marked.has(place.node)) continue
    const x = right(scene, place) + k * place.length + 3
    pen.fillRect(x, down(scene, place) - 3, 4, 6)
  }
}

function words(pen: CanvasRenderingContext2D, scene: Scene, shown: readonly Place[]): void {
  const { view, colours } = scene
  const width = COLUMN * view.across - 2 * BUS
  const nLines = Math.max(1, Math.floor((LINE * view.scale - 5) / LEADING))
  const onPath = new Set(scene.path)
  pen.font = `${FONT}px Inter, "Noto Sans", system-ui, sans-serif`
  pen.textBaseline = 'alphabetic'
  pen.textAlign = 'left'
  for (const place of shown) {
    const text = scene.words(place.node, Math.ceil((nLines * width) / 5))
    const rows = wrapped(pen, text, width, nLines)
    pen.direction = isRightToLeft(text) ? 'rtl' : 'ltr'
    const isLit = onPath.has(place.node) || place.node === scene.hovered
    pen.fillStyle = isLit ? colours.text : colours.muted
    const [x, y] = [right(scene, place) + 1, down(scene, place) - 5]
    for (const [i, row] of rows.entries()) pen.fillText(row, x, y - LEADING * (rows.length - 1 - i))
  }
}

const kept = new Map<string, string[]>()

/** Text in lines of `width` pixels, cut after `most` lines. */
function wrapped(pen: CanvasRenderingContext2D, text: string, width: number, maxLines: number): string[] {
  const key = `${Math.round(width)}/${maxLines}/${text}`
  let rows = kept.get(key)
  if (!rows) {
    rows = wrap(text, width, maxLines, (part) => pen.measureText(part).width)
    if (kept.size > 4000) kept.clear()
    kept.set(key, rows)
  }
  return rows
}

/** Break text at spaces, or anywhere if there are none. */
export function wrap(
  text: string,
  width: number,
  maxLines: number,
  measure: (part: string) => number,
): string[] {
  const rows: string[] = []
  let rest = text
  while (rest && rows.length < maxLines) {
    const isLast = rows.length === maxLines - 1
    let n = fitting(rest, width, measure)
    if (n < rest.length && !isLast) {
      const blank = rest.lastIndexOf(' ', n)
      if (blank > 0) n = blank
      rows.push(rest.slice(0, n))
      rest = rest.slice(n).trimStart()
    } else {
      rows.push(n < rest.length ? `${beginning(rest, Math.max(1, n - 1)).trimEnd()}…` : rest)
      rest = ''
    }
  }
  return rows
}

/** The number of code units that fit a line, without cutting a character. */
function fitting(text: string, width: number, measure: (part: string) => number): number {
  if (measure(text) <= width) return text.length
  let [low, high] = [1, text.length]
  while (low < high) {
    const mid = (low + high + 1) >> 1
    if (measure(text.slice(0, mid)) <= width) low = mid
    else high = mid - 1
  }
  return Math.max(1, beginning(text, low).length)
}

function knot(pen: CanvasRenderingContext2D, scene: Scene, place: Place): void {
  const [x, y] = [right(scene, place), down(scene, place)]
  pen.beginPath()
  pen.arc(x, y, 4.5, 0, 2 * Math.PI)
  pen.fillStyle = scene.colours.accent
  pen.fill()
  pen.beginPath()
  pen.moveTo(x, y)
  pen.lineTo(x + scene.view.across * place.length, y)
  pen.strokeStyle = scene.colours.accent
  pen.lineWidth = 3
  pen.stroke()
}

/** The entire tree, small, and a frame around its visible part. */
export function paintSmall(pen: CanvasRenderingContext2D, scene: Scene & { shown: Box }): void {
  const { view, width, height, colours, shown } = scene
  pen.fillStyle = colours.bg
  pen.fillRect(0, 0, width, height)
  const path = new Path2D()
  const k = view.across
  for (const place of thinned(scene))
    path.rect(right(scene, place), down(scene, place) - 0.5, Math.max(1, k * place.length), 1)
  pen.fillStyle = colours.muted
  pen.fill(path)
  const here = scene.map.places.get(scene.path[scene.path.length - 1] ?? -1)
  pen.fillStyle = colours.accent
  if (here) pen.fillRect(right(scene, here) - 2, down(scene, here) - 2, 4, 4)
  const x = Math.max(0.5, view.x + k * shown.x0)
  const y = Math.max(0.5, view.y + view.scale * shown.y0)
  pen.strokeStyle = colours.accent
  pen.lineWidth = 1
  pen.strokeRect(
    x,
    y,
    Math.max(3, Math.min(width - 0.5, view.x + k * shown.x1) - x),
    Math.max(3, Math.min(height - 0.5, view.y + view.scale * shown.y1) - y),
  )
}
