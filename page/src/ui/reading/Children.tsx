/** The children of the current node: growing branches and existing nodes. */
import { useComputed } from '@preact/signals'
import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import type { Lane as LaneState } from '../../model/lane'
import { groupEqualLeaves } from '../../model/turns'
import { formatCount } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import { Child } from './Child'
import { Expected, Lane } from './Lane'

const PAGE_ROWS = 60 // rows at a time: what grows stands below them

export function Children({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const current = loom.current.value
  const children = loom.tree.children(current)
  const lanes = useLanes(loom)
  const gone = [...lanes.keys()].filter((each) => !children.includes(each))
  const order = [...children, ...gone]
  const rows = groupEqualLeaves(
    loom.tree,
    children.filter((each) => !lanes.has(each)),
  )
  const [shown, setShown] = useState({ below: current, limit: PAGE_ROWS })
  const limit = shown.below === current ? shown.limit : PAGE_ROWS
  const section = useRef<HTMLElement>(null)
  const asking = loom.growth.requested.value?.parent === current ? loom.growth.requested.value.n : 0
  const isGrowing = useComputed(() =>
    [...loom.lanes.value.values()].some((lane) => growsBelow(lane, loom.current.value)),
  )
  // New branches may be below the fold. If the first is in sight, the text above it stays.
  useLayoutEffect(() => {
    const added = asking ? [...(section.current?.children ?? [])].slice(-asking) : []
    if (!added[0] || isInSight(added[0])) return
    for (const row of [added.at(-1)!, added[0]]) row.scrollIntoView({ block: 'nearest' })
  }, [asking])
  if (!children.length && !lanes.size && !asking) return null
  return (
    <div class="below">
      {rows.length > 0 && (
        <ul class="children" aria-label="Children">
          {rows.slice(0, limit).map((row) => (
            <Child key={row[0]} loom={loom} nodes={row} k={children.indexOf(row[0]!) + 1} />
          ))}
          {rows.length > limit && (
            <li class="child">
              <button
                type="button"
                class="child-in caption"
                onClick={() => setShown({ below: current, limit: limit + PAGE_ROWS })}
              >
                Show more ({formatCount(rows.length)} in all)
              </button>
            </li>
          )}
        </ul>
      )}
      {(lanes.size > 0 || asking > 0) && (
        <section
          ref={section}
          class="lanes"
          aria-label="Growing"
          data-growing={asking > 0 || isGrowing.value || undefined}
          style={{ '--lanes': lanes.size + asking }}
        >
          {[...children.filter((each) => lanes.has(each)), ...gone].map((each) => (
            <Lane key={each} loom={loom} lane={lanes.get(each)!} k={order.indexOf(each) + 1} />
          ))}
          {Array.from({ length: asking }, (_, i) => (
            <Expected key={`asked${i}`} k={order.length + i + 1} />
          ))}
        </section>
      )}
    </div>
  )
}

/** Return true if the lane grows directly below a node. Reading `version` subscribes to changes of the lane. */
function growsBelow(lane: LaneState, parent: number): boolean {
  lane.version.value
  return lane.parent === parent && !lane.isOver
}

/** Return true if all of the element’s height is visible in the pane. */
function isInSight(element: Element): boolean {
  const [own, pane] = [element, element.closest('.reading')!].map((each) => each.getBoundingClientRect())
  return own!.top >= pane!.top && own!.bottom <= pane!.bottom
}

/** Lanes below the current node that grow, or have ended since the user arrived; failed ones stay. */
function useLanes(loom: OpenLoom) {
  const current = loom.current.value
  const visit = useRef<{ current: number | null; over: Set<number> }>({ current: null, over: new Set() })
  const here = [...loom.lanes.value].filter(([number, lane]) => {
    if (lane.parent !== current) return false
    const node = loom.tree.get(number)
    if (node) return node.parent === current // it may have been moved since
    return !(lane.isOver && lane.kept && lane.state !== 'failed') // a user has removed it
  })
  if (visit.current.current !== current) {
    const over = here.filter(([, lane]) => lane.state === 'done').map(([node]) => node)
    visit.current = { current, over: new Set(over) }
  }
  return new Map(
    here.filter(([node, lane]) => {
      if (visit.current.over.has(node)) return false
      return lane.kept || lane.state === 'failed' || !lane.isOver || isEmptyEnd(lane.finish)
    }),
  )
}

/** The branch ended without text: it is not kept, but its end is shown. */
const isEmptyEnd = (finish: string | null) => finish === 'stop' || finish === 'context'
