/** The view of the map's canvas: what it shows, how d3-zoom moves it, and when it is painted. */
import { computed, effect, signal } from '@preact/signals'
import { pointer, type Selection, select } from 'd3-selection'
import 'd3-transition' // adds transition() to selections
import { type D3ZoomEvent, type ZoomTransform, zoom, zoomIdentity } from 'd3-zoom'
import { plainText } from '../../model/label'
import {
  type Box,
  fitAll,
  LONGEST,
  type Place,
  TINTS,
  type Tint,
  TreeMap,
  tints,
  type View,
  visibleBox,
} from '../../model/map'
import { ROOT } from '../../model/tree'
import { oneLine } from '../../model/words'
import { hits } from '../../state/finding'
import type { OpenLoom } from '../../state/loom'
import { oneOf, remembered } from '../../state/storage'
import { theme } from '../../state/view'
import { type Colours, coloursOf, paint, paintSmall } from './paint'

export const tint = remembered('map.tint', 'probability', oneOf<Tint>(TINTS, 'probability'))
const GLIDE_MS = 200
const LARGEST = 4 // pixels per unit
const NEAR = 8 // pixels
/** A press that moves fewer pixels is a click. */
const STILL = 4
/** The first view of a tree with at most this many nodes shows all of them. */
const SMALL = 60
/** The first view also shows all if it would otherwise show fewer nodes than this. */
const FEW = 4

export class MapCanvas {
  readonly hovered = signal<{ node: number; x: number; y: number } | null>(null)
  private width = 0
  private height = 0
  private colours: Colours | null = null
  private frame = 0
  private transform: ZoomTransform = zoomIdentity
  /** The minimum of `View.across`. */
  private minAcross = 0
  /** The root of the map. */
  private top = ROOT
  /** True: all nodes fill the view, also after a resize; false: the current node; null: the user moved it. */
  private fitted: boolean | null = true
  private readonly layout = computed(() => {
    this.loom.tree.version.value
    return new TreeMap(this.loom.tree, this.loom.top)
  })
  private readonly selection: Selection<HTMLCanvasElement, unknown, null, undefined>
  private readonly zooming = zoom<HTMLCanvasElement, unknown>()
    .filter((event) => !event.button)
    .extent(() => this.extent)
    .clickDistance(STILL)
    .duration(glideMs())
    .interpolate(straight)
    .on('zoom', (event) => this.onZoom(event))
  private readonly ends: (() => void)[] = []

  constructor(
    private readonly loom: OpenLoom,
    private readonly canvas: HTMLCanvasElement,
    private readonly small: HTMLCanvasElement,
  ) {
    this.top = loom.top
    this.selection = select(canvas)
    this.selection.call(this.zooming).on('wheel.zoom', (event) => this.onWheel(event), { passive: false })
    const watch = new ResizeObserver(() => this.resize())
    watch.observe(canvas)
    const shade = matchMedia('(prefers-color-scheme: dark)')
    const recolour = () => {
      this.colours = null
      this.draw()
    }
    shade.addEventListener('change', recolour)
    this.ends.push(
      () => watch.disconnect(),
      () => shade.removeEventListener('change', recolour),
      effect(() => {
        theme.value
        tint.value
        setTimeout(recolour) // after the page has the new theme
      }),
      effect(() => {
        this.layout.value
        this.bound()
        if (this.top !== loom.top) this.begin(loom.top)
        if (this.width && this.fitted !== null && loom.sync.loading.value !== null) this.first()
        loom.bookmarks.value
        hits.value
        this.hovered.value
        this.draw()
      }),
      effect(() => this.follow(loom.current.value)),
    )
  }

  close(): void {
    for (const end of this.ends) end()
    cancelAnimationFrame(this.frame)
    this.selection.interrupt()
  }

  private get map() {
    return this.layout.peek()
  }

  private get extent(): [[number, number], [number, number]] {
    const corner: [number, number] = [this.width, this.height]
    return [[0, 0], corner]
  }

  private resize(): void {
    const { clientWidth, clientHeight } = this.canvas
    if (!clientWidth || !clientHeight) return
    const isFirst = !this.width
    this.width = clientWidth
    this.height = clientHeight
    for (const canvas of [this.canvas, this.small]) {
      canvas.width = Math.round(canvas.clientWidth * devicePixelRatio)
      canvas.height = Math.round(canvas.clientHeight * devicePixelRatio)
    }
    this.bound()
    if (isFirst) this.first()
    else if (this.fitted !== null) this.fit(this.fitted, false)
    this.draw()
  }

  /** Show all of a small tree, and the current node of a large one. */
  private first(): void {
    this.fit(this.isOverview(), false)
  }

  private isOverview(): boolean {
    if (this.map.places.size <= SMALL) return true
    const view = this.viewOf(this.fitting(false))
    return [...this.map.within(visibleBox(view, this.width, this.height))].length < FEW
  }

  /** Show another subtree alone. */
  private begin(top: number): void {
    this.top = top
    // After the line above the map has changed the size of the canvas.
    requestAnimationFrame(() => this.width && this.fit(this.isOverview()))
  }

  // The view

  /** The view of a transform. d3-zoom scales both axes alike; from far away the map keeps its width. */
  private viewOf({ k, x, y }: ZoomTransform): View {
    const across = Math.max(k, this.minAcross)
    return { scale: k, across, x: this.width / 2 - (across / k) * (this.width / 2 - x), y }
  }

  private get view(): View {
    return this.viewOf(this.transform)
  }

  /** The view of all nodes. */
  private get all(): View {
    return fitAll(this.map.box, this.width, this.height)
  }

  /** Set how far one can zoom and pan: up to a screen beyond the map, but a map as wide as the screen stays there. */
  private bound(): void {
    const { all, width, height } = this
    const { x0, y0, x1, y1 } = this.map.box
    const isTall = all.scale < all.across
    this.minAcross = isTall ? all.across : 0
    const padX = isTall ? (width / all.across - (x1 - x0)) / 2 : width
    this.zooming.scaleExtent([all.scale, LARGEST]).translateExtent([
      [x0 - padX, y0 - height],
      [x1 + padX, y1 + height],
    ])
  }

  pan(dx: number, dy: number): void {
    this.fitted = null
    const { k } = this.transform
    this.zooming.translateBy(this.selection, dx / k, dy / k)
  }

  /** Zoom around a point of the screen, or its middle. */
  zoomBy(by: number, at?: [number, number]): void {
    this.fitted = null
    this.zooming.scaleBy(this.selection, by, at)
  }

  /** Show all, or the current node large enough to read. */
  fit(isAll: boolean, isSmooth = true): void {
    this.fitted = isAll
    this.move(this.fitting(isAll), isSmooth)
  }

  private fitting(isAll: boolean): ZoomTransform {
    const { x0, x1, y0, y1 } = this.map.box
    const place = this.map.places.get(this.loom.current.peek())
    if (isAll || !place) return this.centred((x0 + x1) / 2, (y0 + y1) / 2, this.all.scale)
    return this.centred(place.x + LONGEST / 2, place.y, Math.max(1, this.transform.k))
  }

  private centred(x: number, y: number, k: number): ZoomTransform {
    const to = zoomIdentity
      .translate(this.width / 2, this.height / 2)
      .scale(k)
      .translate(-x, -y)
    const { zooming } = this
    return zooming.constrain()(to, this.extent, zooming.translateExtent())
  }

  /** Centre the view on a point of the small map. */
  lookAtSmall(x: number, y: number): void {
    this.fitted = null
    const all = this.ofSmall()
    const { k } = this.transform
    this.move(this.centred((x - all.x) / all.across, (y - all.y) / all.scale, k), false)
  }

  private ofSmall(): View {
    return fitAll(this.map.box, this.small.clientWidth, this.small.clientHeight, 4)
  }

  private move(to: ZoomTransform, isSmooth = true): void {
    const duration = isSmooth ? glideMs() : 0
    this.zooming.transform(duration ? this.selection.transition().duration(duration) : this.selection, to)
  }

  private onZoom({ sourceEvent, transform }: D3ZoomEvent<HTMLCanvasElement, unknown>): void {
    if (transform === this.transform) return
    this.transform = transform
    if (sourceEvent) this.fitted = null // a gesture
    // Setting the transform anchors the fingers to what is now below them: `viewOf` may have moved it.
    if (sourceEvent?.type === 'touchmove') this.zooming.transform(this.selection, transform)
    this.draw()
  }

  /** Zoom; with Shift, or sideways on a touchpad, pan across. */
  private onWheel(event: WheelEvent): void {
    event.preventDefault()
    const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      this.pan(-unit * (event.deltaX || event.deltaY), 0)
    else this.zoomBy(Math.exp(-unit * (event.ctrlKey ? 0.01 : 0.002) * event.deltaY), pointer(event))
  }

  /** Keep the current node in sight. */
  private follow(node: number): void {
    const place = this.map.places.get(node)
    this.draw()
    if (!place || !this.width) return
    const { view, width, height } = this
    const [x, y] = [view.x + view.across * place.x, view.y + view.scale * place.y]
    const margin = 32
    if (x < margin || y < margin || x > width - 2 * margin || y > height - margin) {
      if (this.loom.sync.loading.peek() === null) this.fitted = null
      this.move(this.centred(place.x + LONGEST / 2, place.y, view.scale))
    }
  }

  /** The node at a point of the canvas. */
  at(x: number, y: number): Place | null {
    const { view } = this
    const near = NEAR / Math.max(0.05, view.scale)
    return this.map.at((x - view.x) / view.across, (y - view.y) / view.scale, near)
  }

  // Drawing

  draw(): void {
    if (this.frame) return
    this.frame = requestAnimationFrame(() => {
      this.frame = 0
      this.paint()
    })
  }

  private paint(): void {
    if (!this.width) return
    const { loom, map, view, width, height } = this
    this.colours ??= coloursOf(this.canvas, tint.peek())
    const { prompt, chat_template_used } = loom.info.peek()
    const results = hits.peek()
    const scene = {
      map,
      view,
      width,
      height,
      path: loom.tree.path(loom.current.peek()),
      marked: new Set(loom.bookmarks.peek()),
      hits: results ? new Set(results.matches.map((each) => each.node)) : null,
      hovered: this.hovered.peek()?.node ?? null,
      tint: tints(loom.tree, tint.peek()),
      words: (number: number, maxLength: number) =>
        oneLine(plainText(loom.tree.get(number)!, prompt, chat_template_used ?? false), maxLength),
      colours: this.colours,
    }
    const pen = penOf(this.canvas)
    paint(pen, scene)
    const shown = visibleBox(view, width, height)
    const isComplete = contains(shown, map.box)
    this.small.hidden = isComplete
    if (isComplete) return
    paintSmall(penOf(this.small), {
      ...scene,
      view: this.ofSmall(),
      width: this.small.clientWidth,
      height: this.small.clientHeight,
      shown,
    })
  }
}

/** Interpolate between [x, y, width] in d3-zoom so that each point of the map moves along a straight line. */
function straight(a: readonly number[], b: readonly number[]) {
  return (t: number): [number, number, number] => {
    const mix = (from: number, to: number) => from + (to - from) * t
    const k = mix(1 / a[2]!, 1 / b[2]!)
    return [mix(a[0]! / a[2]!, b[0]! / b[2]!) / k, mix(a[1]! / a[2]!, b[1]! / b[2]!) / k, 1 / k]
  }
}

const glideMs = () => (matchMedia('(prefers-reduced-motion: reduce)').matches ? 0 : GLIDE_MS)

function penOf(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const pen = canvas.getContext('2d', { alpha: false })!
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0)
  return pen
}

const contains = (outer: Box, inner: Box) =>
  outer.x0 <= inner.x0 && outer.x1 >= inner.x1 && outer.y0 <= inner.y0 && outer.y1 >= inner.y1
