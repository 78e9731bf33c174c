/** The outline: the page contains the visible rows only. */
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { branchLines, pathLine, ROW } from '../../model/guides'
import type { Outline } from '../../model/outline'
import { onlyHits } from '../../state/finding'
import { setVisibleNodes } from '../../state/kvStates'
import type { OpenLoom } from '../../state/loom'
import { LongPress } from './longPress'
import { OutlineRow, rowId } from './Row'
import { clickRow, dragged, menuAt, moving, nodeAt, rowKey } from './rowEvents'
import { rowsOf } from './rows'

const AHEAD = 8 // rows beyond the edges
const MARGIN = 2 * ROW // what stays visible around the current row

interface Window {
  top: number
  height: number
}

export function OutlineTree({ loom }: { loom: OpenLoom }) {
  const box = useRef<HTMLDivElement>(null)
  const [visible, setVisible] = useState<Window>({ top: 0, height: 900 })
  const outline = rowsOf(loom).outline.value
  const current = loom.current.value
  const look = () => {
    const { scrollTop, clientHeight } = box.current!
    const top = Math.floor(scrollTop / (4 * ROW)) * 4
    setVisible((now) =>
      now.top === top && now.height === clientHeight ? now : { top, height: clientHeight },
    )
  }
  const hold = useRef(new LongPress()).current
  const [pointed, setPointed] = useState(-1)
  useSize(box, look)
  useKeptPlace(box, outline, current, look)

  loom.position.visitedVersion.value
  const version = loom.tree.version.value
  const selected = loom.selected.value
  const only = onlyHits.value
  const from = Math.max(0, Math.min(visible.top, outline.rows.length) - AHEAD)
  const to = Math.min(outline.rows.length, visible.top + Math.ceil(visible.height / ROW) + 4 + AHEAD)
  const shown = outline.rows.slice(from, to).map((row) => ({ row, node: outline.shownNodeOf(row, current) }))
  useEffect(() => setVisibleNodes(shown.map((each) => each.node)))
  useEffect(() => () => setVisibleNodes([]), [])
  return (
    <div
      ref={box}
      class={`tree-rows${moving.value === null ? '' : ' choosing'}`}
      role="tree"
      aria-label="Tree"
      aria-multiselectable="true"
      aria-activedescendant={shown.some((each) => each.node === current) ? rowId(current) : undefined}
      tabIndex={0}
      onScroll={look}
      onPointerOver={(event) => setPointed(event.pointerType === 'mouse' ? nodeAt(event.target) : -1)}
      onPointerLeave={() => setPointed(-1)}
      onPointerDown={(event) => hold.down(event, () => menuAt(loom, event))}
      onPointerMove={(event) => hold.move(event)}
      onPointerUp={() => hold.end()}
      onPointerCancel={() => hold.end()}
      onClick={(event) => hold.takesClick() || clickRow(loom, event)}
      onContextMenu={(event) => menuAt(loom, event)}
      onKeyDown={(event) => rowKey(loom, event)}
      onDragStart={(event) => dragged(loom, event)}
      onDragOver={(event) => dragged(loom, event)}
      onDrop={(event) => dragged(loom, event)}
      onDragEnd={(event) => dragged(loom, event)}
    >
      <div role="none" class="tree-all" style={{ height: `${outline.rows.length * ROW}px` }}>
        <svg
          class="guides"
          aria-hidden="true"
          style={{ top: `${from * ROW}px`, height: `${(to - from) * ROW}px` }}
        >
          <g transform={`translate(0 ${-from * ROW})`}>
            <path class="lines" d={branchLines(outline, from, to)} />
            <path class="thread" d={pathLine(outline, outline.path(current))} />
          </g>
        </svg>
        <div role="none" class="tree-seen" style={{ transform: `translateY(${from * ROW}px)` }}>
          {shown.map(({ row, node }) => (
            <OutlineRow
              key={row.chain[0]}
              loom={loom}
              row={row}
              node={node}
              isCurrent={node === current}
              isSelected={(row.same.length ? row.same : row.chain).some((each) => selected.has(each))}
              isUnread={(row.same.length ? [node] : row.chain).some((each) => loom.isUnread(each))}
              isPointed={node === pointed}
              isHit={only ? only.has(node) : null}
              version={version}
            />
          ))}
        </div>
      </div>
    </div>
  )
}

/** Report the size of the box, at first and after each change. */
function useSize(box: { current: HTMLDivElement | null }, look: () => void): void {
  useLayoutEffect(() => {
    const watch = new ResizeObserver(look)
    watch.observe(box.current!)
    return () => watch.disconnect()
  }, [])
}

/** Rows that come and go elsewhere do not move what is looked at; who moves is followed. */
function useKeptPlace(
  box: { current: HTMLDivElement | null },
  outline: Outline,
  current: number,
  look: () => void,
): void {
  const before = useRef<{ outline: Outline; current: number } | null>(null)
  useLayoutEffect(() => {
    const element = box.current!
    const last = before.current
    before.current = { outline, current }
    const row = outline.rowOf(current)
    if (last && last.outline !== outline) {
      const anchor = anchorOf(last.outline, last.current, element)
      const place = anchor === null ? -1 : outline.rowOf(anchor.node)
      if (place >= 0) element.scrollTop = place * ROW - anchor!.offset
    }
    const isNew = last?.current !== current || last.outline.rowOf(current) < 0
    if (row >= 0 && isNew) show(element, row)
    look()
  }, [outline, current])
}

/** A visible row and its distance from the top edge: the current row if it is visible. */
function anchorOf(
  outline: Outline,
  current: number,
  element: HTMLElement,
): { node: number; offset: number } | null {
  const at = outline.rowOf(current)
  const offset = at * ROW - element.scrollTop
  if (at >= 0 && offset > -ROW && offset < element.clientHeight) return { node: current, offset }
  const first = Math.ceil(element.scrollTop / ROW)
  const row = outline.rows[first]
  return row ? { node: row.chain[0]!, offset: first * ROW - element.scrollTop } : null
}

/** Scroll no further than it needs to; from far away, to the middle. */
function show(element: HTMLElement, row: number): void {
  const [top, height] = [row * ROW, element.clientHeight]
  const margin = height > 4 * MARGIN ? MARGIN : 0
  const low = element.scrollTop + margin
  const high = element.scrollTop + height - ROW - margin
  if (top < low - height || top > high + height) element.scrollTop = top - height / 2
  else if (top < low) element.scrollTop = top - margin
  else if (top > high) element.scrollTop = top - height + ROW + margin
}
