/** The tree as a map on a canvas; for those who do not see it the outline stays where it is. */
import { LocateFixed, Maximize, ZoomIn, ZoomOut } from 'lucide-preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { label, meanP } from '../../model/label'
import { TINTS, type Tint } from '../../model/map'
import { averageProbability, count, plural } from '../../model/words'
import { provide } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { menu, moveTo, moving, select } from './rowEvents'
import { Stage, tint } from './stage'
import './map.css'

const TINT_WORDS: Record<Tint, string> = {
  probability: 'Probability',
  score: 'Score',
  age: 'Age',
}
const ZOOM = 1.25
const STEP = 60 // pixels a key press

export function MapView({ loom }: { loom: OpenLoom }) {
  const canvas = useRef<HTMLCanvasElement>(null)
  const small = useRef<HTMLCanvasElement>(null)
  const [stage, setStage] = useState<Stage | null>(null)
  useEffect(() => {
    const made = new Stage(loom, canvas.current!, small.current!)
    setStage(made)
    const undo = provide('fit', (isAll) => made.fit(isAll))
    const onWheel = (event: WheelEvent) => {
      event.preventDefault()
      wheel(made, event)
    }
    canvas.current!.addEventListener('wheel', onWheel, { passive: false })
    return () => {
      undo()
      made.close()
    }
  }, [loom])
  loom.tree.version.value
  const askMenu = (event: MouseEvent) => {
    const found = stage?.at(event.offsetX, event.offsetY)
    if (found) menu.value = { node: found.node, x: event.clientX, y: event.clientY }
  }
  const drag = useDrag(stage, (event) => stage && press(loom, stage, event), askMenu)
  return (
    <div class="map">
      <canvas
        ref={canvas}
        class="map-canvas"
        role="img"
        aria-label={`Map of ${plural(loom.tree.size, 'node')}. The outline has the same nodes as text.`}
        tabIndex={0}
        onKeyDown={(event) => stage && key(stage, event)}
        onContextMenu={(event) => {
          event.preventDefault()
          drag.letGo()
          askMenu(event)
        }}
        {...drag.on}
      />
      <canvas
        ref={small}
        class="map-small"
        aria-hidden
        hidden
        onPointerDown={(event) => {
          event.currentTarget.setPointerCapture(event.pointerId)
          stage?.lookAtSmall(event.offsetX, event.offsetY)
        }}
        onPointerMove={(event) => event.buttons && stage?.lookAtSmall(event.offsetX, event.offsetY)}
      />
      <div class="map-tools row">
        <select
          class="field"
          aria-label="Colour of the map"
          value={tint.value}
          onChange={(event) => (tint.value = event.currentTarget.value as Tint)}
        >
          {TINTS.map((each) => (
            <option key={each} value={each}>
              {TINT_WORDS[each]}
            </option>
          ))}
        </select>
        <IconButton icon={ZoomOut} label="Zoom out" onClick={() => stage?.zoom(1 / ZOOM)} />
        <IconButton icon={ZoomIn} label="Zoom in" onClick={() => stage?.zoom(ZOOM)} />
        <IconButton icon={LocateFixed} label="Zoom to the current node" command="fit" />
        <IconButton icon={Maximize} label="Zoom to fit all" command="fit-all" />
      </div>
      {stage && <Words loom={loom} stage={stage} />}
    </div>
  )
}

/** The words of the node that is pointed at. */
function Words({ loom, stage }: { loom: OpenLoom; stage: Stage }) {
  const at = stage.hovered.value
  const node = at && loom.tree.get(at.node)
  if (!node) return null
  const { prompt, chat_template_used } = loom.info.value
  const p = meanP(node)
  return (
    <div
      class="map-words"
      role="tooltip"
      ref={(box) => {
        if (!box) return
        const { width, height } = box.getBoundingClientRect()
        box.style.left = `${Math.max(4, Math.min(at.x + 12, innerWidth - width - 4))}px`
        box.style.top = `${at.y + 16 + height > innerHeight ? at.y - height - 8 : at.y + 16}px`
      }}
    >
      <p dir="auto">{label(node, prompt, chat_template_used ?? false, 240).text}</p>
      <p class="caption">
        {plural(node.n_tokens, 'token')}
        {p !== null && ` · ${averageProbability(p)}`}
        {typeof node.score === 'number' && ` · score ${node.score.toFixed(2)}`}
        {node.children.length > 0 && ` · ${count(node.children.length)} below`}
      </p>
    </div>
  )
}

function press(loom: OpenLoom, stage: Stage, event: PointerEvent): void {
  const found = stage.at(event.offsetX, event.offsetY)
  if (!found) return
  if (moving.peek() !== null) moveTo(loom, found.node)
  else if (event.ctrlKey || event.metaKey) select(loom, found.node)
  else loom.go(found.node)
}

/** A wheel zooms, or pans across with Shift; two fingers on a pad pinch as Ctrl and a wheel. */
function wheel(stage: Stage, event: WheelEvent): void {
  const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    stage.pan(-unit * (event.deltaX || event.deltaY), 0)
    return
  }
  const speed = event.ctrlKey ? 0.01 : 0.002
  stage.zoom(Math.exp(-unit * speed * event.deltaY), event.offsetX, event.offsetY)
}

function key(stage: Stage, event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return
  const way = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key]
  if (way && event.shiftKey) stage.pan(STEP * way[0]!, STEP * way[1]!)
  else if (event.key === '+' || event.key === '=') stage.zoom(ZOOM)
  else if (event.key === '-') stage.zoom(1 / ZOOM)
  else return
  event.preventDefault()
}

const STILL = 4 // pixels: a press that moves less is a click

const HOLD_MS = 500

/** Dragging pans, two fingers pinch, what did not move is a press, and a finger that stays asks. */
function useDrag(
  stage: Stage | null,
  onPress: (event: PointerEvent) => void,
  onHold: (event: PointerEvent) => void,
) {
  const state = useRef({ points: new Map<number, { x: number; y: number }>(), moved: 0, timer: 0 }).current
  const point = (event: PointerEvent) => ({ x: event.offsetX, y: event.offsetY })
  const letGo = () => {
    clearTimeout(state.timer)
    state.points.clear()
  }
  const on = {
    onPointerDown: (event: PointerEvent) => {
      if (event.button !== 0) return
      ;(event.currentTarget as Element).setPointerCapture(event.pointerId)
      if (!state.points.size) state.moved = 0
      state.points.set(event.pointerId, point(event))
      clearTimeout(state.timer)
      if (event.pointerType === 'mouse' || state.points.size > 1) return
      // Not all browsers make of a long touch what a right button does.
      state.timer = window.setTimeout(() => {
        if (state.moved > STILL) return
        letGo()
        onHold(event)
      }, HOLD_MS)
    },
    onPointerMove: (event: PointerEvent) => {
      if (!stage) return
      const before = state.points.get(event.pointerId)
      if (!before) {
        const found = event.pointerType === 'mouse' ? stage.at(event.offsetX, event.offsetY) : null
        const now = stage.hovered.peek()
        if (found || now)
          stage.hovered.value = found ? { node: found.node, x: event.clientX, y: event.clientY } : null
        return
      }
      const now = point(event)
      state.moved += Math.hypot(now.x - before.x, now.y - before.y)
      const other = [...state.points].find(([id]) => id !== event.pointerId)?.[1]
      if (other) {
        const [was, is] = [before, now].map((each) => Math.hypot(each.x - other.x, each.y - other.y))
        if (was! > 0) stage.zoom(is! / was!, (now.x + other.x) / 2, (now.y + other.y) / 2)
      } else if (state.moved > STILL) {
        stage.hovered.value = null
        stage.pan(now.x - before.x, now.y - before.y)
      }
      state.points.set(event.pointerId, now)
    },
    onPointerUp: (event: PointerEvent) => {
      clearTimeout(state.timer)
      const isPress = state.points.delete(event.pointerId) && state.moved <= STILL && !state.points.size
      if (isPress) onPress(event)
    },
    onPointerCancel: (event: PointerEvent) => {
      clearTimeout(state.timer)
      state.points.delete(event.pointerId)
    },
    onPointerLeave: () => {
      if (stage) stage.hovered.value = null
    },
  }
  return { on, letGo }
}
