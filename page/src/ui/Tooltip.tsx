/** Show an element's `title` on keyboard focus and on a long touch, where browsers do not. */
import { useEffect, useRef } from 'preact/hooks'
import './tooltip.css'

const WAIT_MS = 500
const GAP = 6 // pixels

export function Tooltip() {
  const box = useRef<HTMLDivElement>(null)
  useEffect(() => {
    let waiting = 0
    const tip = box.current!
    const hide = () => {
      clearTimeout(waiting)
      tip.hidePopover()
    }
    const showSoon = (event: Event) => {
      hide()
      const target = event.target instanceof Element ? event.target.closest('[title]') : null
      if (target) waiting = window.setTimeout(() => target.isConnected && show(tip, target), WAIT_MS)
    }
    const onFocus = (event: FocusEvent) => {
      const target = event.target as Element
      if (target.matches('[title]:focus-visible:not(textarea)')) showSoon(event)
    }
    const onPointer = (event: PointerEvent) => (event.pointerType === 'touch' ? showSoon(event) : hide())
    const hides = ['focusout', 'keydown', 'scroll']
    const listening = new AbortController()
    const options = { capture: true, signal: listening.signal }
    addEventListener('focusin', onFocus, options)
    addEventListener('pointerdown', onPointer, options)
    for (const each of hides) addEventListener(each, hide, options)
    for (const each of ['pointerup', 'pointercancel'])
      addEventListener(each, () => clearTimeout(waiting), options)
    return () => {
      clearTimeout(waiting)
      listening.abort()
    }
  }, [])
  return <div ref={box} class="tooltip" popover="manual" aria-hidden />
}

/** Show the title below its element, or above it at the bottom of the page. */
function show(tip: HTMLElement, target: Element): void {
  tip.dataset['text'] = target.getAttribute('title') ?? ''
  if (!tip.dataset['text']) return
  tip.showPopover()
  const at = target.getBoundingClientRect()
  const { width, height } = tip.getBoundingClientRect()
  const below = at.bottom + GAP
  const top = below + height > innerHeight ? at.top - GAP - height : below
  tip.style.top = `${Math.max(0, top)}px`
  tip.style.left = `${Math.max(0, Math.min(at.left, innerWidth - width - GAP))}px`
}
