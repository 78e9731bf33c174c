/** The tree as a map on a canvas. Screen readers use the outline, which stays in the page. */
import { LocateFixed, Maximize, ZoomIn, ZoomOut } from 'lucide-preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { label, meanP } from '../../model/label'
import { TINTS, type Tint } from '../../model/map'
import { averageProbability, formatCount, plural } from '../../model/words'
import { provide } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { LongPress } from './longPress'
import { MapCanvas, tint } from './mapCanvas'
import { menu, moveTo, moving, select } from './rowEvents'
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
  const [stage, setStage] = useState<MapCanvas | null>(null)
  useEffect(() => {
    const created = new MapCanvas(loom, canvas.current!, small.current!)
    setStage(created)
    const undo = provide('fit', (isAll) => created.fit(isAll))
    return () => {
      undo()
      created.close()
    }
  }, [loom])
  loom.tree.version.value
  const openMenu = (event: MouseEvent) => {
    const place = stage?.at(event.offsetX, event.offsetY)
    if (place) menu.value = { node: place.node, x: event.clientX, y: event.clientY }
  }
  const hold = useRef(new LongPress()).current
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
          hold.end()
          openMenu(event)
        }}
        onPointerDown={(event) => hold.down(event, () => openMenu(event))}
        onPointerMove={(event) => {
          hold.move(event)
          if (stage) hover(stage, event)
        }}
        onPointerUp={() => hold.end()}
        onPointerCancel={() => hold.end()}
        onPointerLeave={() => {
          if (stage) stage.hovered.value = null
        }}
        onClick={(event) => stage && !hold.takesClick() && press(loom, stage, event)}
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
        <IconButton icon={ZoomOut} label="Zoom out" onClick={() => stage?.zoomBy(1 / ZOOM)} />
        <IconButton icon={ZoomIn} label="Zoom in" onClick={() => stage?.zoomBy(ZOOM)} />
        <IconButton icon={LocateFixed} label="Zoom to the current node" command="fit" />
        <IconButton icon={Maximize} label="Zoom to fit all" command="fit-all" />
      </div>
      {stage && <Words loom={loom} stage={stage} />}
    </div>
  )
}

/** The text of the node below the pointer. */
function Words({ loom, stage }: { loom: OpenLoom; stage: MapCanvas }) {
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
        {node.children.length > 0 && ` · ${formatCount(node.children.length)} below`}
      </p>
    </div>
  )
}

/** Show the text of the node below a mouse that does not drag. */
function hover(stage: MapCanvas, event: PointerEvent): void {
  const isMouse = event.pointerType === 'mouse' && !event.buttons
  const place = isMouse ? stage.at(event.offsetX, event.offsetY) : null
  if (place || stage.hovered.peek())
    stage.hovered.value = place && { node: place.node, x: event.clientX, y: event.clientY }
}

function press(loom: OpenLoom, stage: MapCanvas, event: MouseEvent): void {
  const place = stage.at(event.offsetX, event.offsetY)
  if (!place) return
  if (moving.peek() !== null) moveTo(loom, place.node)
  else if (event.ctrlKey || event.metaKey) select(loom, place.node)
  else loom.navigate(place.node)
}

function key(stage: MapCanvas, event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return
  const way = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key]
  if (way && event.shiftKey) stage.pan(STEP * way[0]!, STEP * way[1]!)
  else if (event.key === '+' || event.key === '=') stage.zoomBy(ZOOM)
  else if (event.key === '-') stage.zoomBy(1 / ZOOM)
  else return
  event.preventDefault()
}
