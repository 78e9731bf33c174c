/** The scroll position: the current node is visible, and the text that the user reads does not move. */
import type { RefObject } from 'preact'
import { useEffect, useLayoutEffect, useRef } from 'preact/hooks'
import type { OpenLoom } from '../../state/loom'
import { forgetLost } from './usePointing'

const NEAR = 24 // px from the end that count as the end
const HEAD = 40 // a node's beginning stays so far below the top
const FOOT = 140 // and so far above the foot

export function useScrollPosition(loom: OpenLoom, pane: RefObject<HTMLElement>): void {
  const current = loom.current.value
  const isLoaded = loom.sync.loading.value === null
  const isAtEnd = useRef(false)

  useLayoutEffect(() => {
    forgetLost(loom)
    const box = pane.current
    const node = box?.querySelector(`.path [data-node="${current}"]`)
    if (!box || !node) return
    const lines = [...node.getClientRects()]
    const first = lines[0] ?? node.getBoundingClientRect()
    const within = box.getBoundingClientRect()
    if (first.top < within.top + HEAD) box.scrollTop += first.top - within.top - HEAD
    else if (first.top > within.bottom - FOOT) box.scrollTop += first.top - within.top - within.height / 3
    isAtEnd.current = false
  }, [current, isLoaded])

  // At the end of a growing text the view follows it; a user who has scrolled away is left alone.
  const lane = loom.lanes.value.get(current)
  useEffect(() => {
    const box = pane.current
    if (!box || !lane || lane.isOver) return
    let was = box.scrollTop
    const isNear = () => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR
    isAtEnd.current = isNear()
    const onScroll = () => {
      if (box.scrollTop < was) isAtEnd.current = false
      else if (isNear()) isAtEnd.current = true
      was = box.scrollTop
    }
    const observer = new ResizeObserver(() => {
      if (isAtEnd.current) box.scrollTop = box.scrollHeight
    })
    box.addEventListener('scroll', onScroll, { passive: true })
    if (box.firstElementChild) observer.observe(box.firstElementChild)
    return () => {
      box.removeEventListener('scroll', onScroll)
      observer.disconnect()
    }
  }, [lane])
}
