/** What the map's canvas shows: where one looks, how that moves, and when it is drawn. */
import { effect, signal } from '@preact/signals'
import { plain } from '../../model/label'
import {
  across,
  type Box,
  centred,
  fitAll,
  fitPlace,
  type Place,
  TINTS,
  type Tint,
  tints,
  type View,
  visible,
  zoomed,
} from '../../model/map'
import { ROOT } from '../../model/tree'
import { oneLine } from '../../model/words'
import { hits } from '../../state/finding'
import type { OpenLoom } from '../../state/loom'
import { among, remembered } from '../../state/storage'
import { theme } from '../../state/view'
import { coloursOf, mapOf } from './maps'
import { type Colours, paint, paintSmall } from './paint'

export const tint = remembered('map.tint', 'probability', among<Tint>(TINTS, 'probability'))
const GLIDE_MS = 200
const NEAR = 8 // pixels
/** Trees up to so many nodes are shown as a whole at first. */
const SMALL = 60
/** So few nodes tell nothing of a tree. */
const FEW = 4

export class Stage {
  readonly hovered = signal<{ node: number; x: number; y: number } | null>(null)
  private view: View = { scale: 1, across: 1, x: 0, y: 0 }
  private width = 0
  private height = 0
  private colours: Colours | null = null
  private asked = 0
  private glide = 0
  private hasView = false
  /** Where the map begins. */
  private top = ROOT
  /** Somebody has looked elsewhere: from now on the view is theirs. */
  private isTouched = false
  /** What fills the view, all or the current node, until one looks elsewhere: it goes with the size. */
  private fitted: boolean | null = null
  private readonly ends: (() => void)[] = []

  constructor(
    private readonly loom: OpenLoom,
    private readonly canvas: HTMLCanvasElement,
    private readonly small: HTMLCanvasElement,
  ) {
    this.top = loom.top
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
        setTimeout(recolour) // once the page wears it
      }),
      effect(() => {
        mapOf(loom).value
        if (this.top !== loom.top) this.begin(loom.top)
        if (!this.isTouched && this.hasView && loom.sync.loading.value !== null) this.first()
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
    cancelAnimationFrame(this.asked)
    cancelAnimationFrame(this.glide)
  }

  private get map() {
    return mapOf(this.loom).peek()
  }

  private resize(): void {
    const { clientWidth, clientHeight } = this.canvas
    if (!clientWidth || !clientHeight) return
    this.width = clientWidth
    this.height = clientHeight
    for (const each of [this.canvas, this.small]) {
      each.width = Math.round(each.clientWidth * devicePixelRatio)
      each.height = Math.round(each.clientHeight * devicePixelRatio)
    }
    if (!this.hasView) {
      this.hasView = true
      this.first()
    } else if (this.fitted !== null) this.fit(this.fitted, false)
    this.draw()
  }

  /** A small tree as a whole; of a large one where one stands, if anything else is seen there. */
  private first(): void {
    this.fit(this.isOverview(), false)
    this.isTouched = this.loom.sync.loading.peek() === null
  }

  private isOverview(): boolean {
    if (this.map.places.size <= SMALL) return true
    const around = this.map.within(visible(this.viewOf(false), this.width, this.height))
    return [...around].length < FEW
  }

  /** Another part of the tree is the whole now: it stands elsewhere. */
  private begin(top: number): void {
    this.top = top
    // Once the line above the map has taken its room.
    requestAnimationFrame(() => this.hasView && this.fit(this.isOverview()))
  }

  // Looking elsewhere

  pan(dx: number, dy: number): void {
    this.fitted = null
    this.look({ ...this.view, x: this.view.x + dx, y: this.view.y + dy })
  }

  zoom(by: number, x = this.width / 2, y = this.height / 2): void {
    this.fitted = null
    this.look(zoomed(this.view, by, x, y))
  }

  /** Show all, or the current node large enough to read. */
  fit(isAll: boolean, isSmooth = true): void {
    this.fitted = isAll
    const to = this.viewOf(isAll)
    if (isSmooth) this.move(to)
    else this.look(to)
  }

  private viewOf(isAll: boolean): View {
    const place = this.map.places.get(this.loom.current.peek())
    const all = fitAll(this.map.box, this.width, this.height)
    if (isAll || !place) return all
    return fitPlace(place, { ...this.view, across: all.across }, this.width, this.height)
  }

  /** Move the part that the small map shows so that a place of it is in the middle. */
  lookAtSmall(x: number, y: number): void {
    this.fitted = null
    const all = this.ofSmall()
    const place = { x: (x - all.x) / across(all), y: (y - all.y) / all.scale }
    const { view } = this
    this.look({
      ...view,
      x: this.width / 2 - across(view) * place.x,
      y: this.height / 2 - view.scale * place.y,
    })
  }

  private ofSmall(): View {
    return fitAll(this.map.box, this.small.clientWidth, this.small.clientHeight, 4)
  }

  private look(view: View): void {
    this.isTouched = true
    cancelAnimationFrame(this.glide)
    this.view = view
    this.draw()
  }

  private move(to: View): void {
    cancelAnimationFrame(this.glide)
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) {
      this.look(to)
      return
    }
    const from = this.view
    const began = performance.now()
    const step = (now: number) => {
      const done = Math.min(1, Math.max(0, (now - began) / GLIDE_MS))
      const part = 1 - (1 - done) ** 3
      const between = (a: number, b: number) => a + (b - a) * part
      this.view = {
        scale: between(from.scale, to.scale),
        across: between(from.across, to.across),
        x: between(from.x, to.x),
        y: between(from.y, to.y),
      }
      this.draw()
      if (done < 1) this.glide = requestAnimationFrame(step)
    }
    this.glide = requestAnimationFrame(step)
  }

  /** Keep the current node in sight. */
  private follow(node: number): void {
    const place = this.map.places.get(node)
    this.draw()
    if (!place || !this.hasView) return
    const [x, y] = [this.view.x + across(this.view) * place.x, this.view.y + this.view.scale * place.y]
    const margin = 32
    if (x < margin || y < margin || x > this.width - 2 * margin || y > this.height - margin) {
      this.fitted = null
      this.move(centred(place, this.view, this.width, this.height))
    }
  }

  /** The node at a point of the canvas. */
  at(x: number, y: number): Place | null {
    const { view } = this
    const near = NEAR / Math.max(0.05, view.scale)
    const found = this.map.at((x - view.x) / across(view), (y - view.y) / view.scale, near)
    return found
  }

  // Drawing

  draw(): void {
    if (this.asked) return
    this.asked = requestAnimationFrame(() => {
      this.asked = 0
      this.paint()
    })
  }

  private paint(): void {
    if (!this.width) return
    const { loom, map, view, width, height } = this
    this.colours ??= coloursOf(this.canvas, tint.peek())
    const { prompt, chat_template_used } = loom.info.peek()
    const found = hits.peek()
    const scene = {
      map,
      view,
      width,
      height,
      path: loom.tree.path(loom.current.peek()),
      marked: new Set(loom.bookmarks.peek()),
      hits: found ? new Set(found.found.map((each) => each.node)) : null,
      hovered: this.hovered.peek()?.node ?? null,
      tint: tints(loom.tree, tint.peek()),
      words: (number: number, most: number) =>
        oneLine(plain(loom.tree.get(number)!, prompt, chat_template_used ?? false), most),
      colours: this.colours,
    }
    const pen = penOf(this.canvas)
    paint(pen, scene)
    const seen = visible(view, width, height)
    const isWhole = holds(seen, map.box)
    this.small.hidden = isWhole
    if (isWhole) return
    paintSmall(penOf(this.small), {
      ...scene,
      view: this.ofSmall(),
      width: this.small.clientWidth,
      height: this.small.clientHeight,
      seen,
    })
  }
}

function penOf(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const pen = canvas.getContext('2d', { alpha: false })!
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0)
  return pen
}

const holds = (outer: Box, inner: Box) =>
  outer.x0 <= inner.x0 && outer.x1 >= inner.x1 && outer.y0 <= inner.y0 && outer.y1 >= inner.y1
