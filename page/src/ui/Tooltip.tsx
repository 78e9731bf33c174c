/** Show an element's `title` on keyboard focus, on a tap and on a long touch, where browsers do not. */
import { useEffect, useRef } from 'preact/hooks'
import './tooltip.css'

const WAIT_MS = 500
const GAP = 6 // pixels
/** Elements that a tap activates; a long touch shows their title. */
const ACTIONS =
  'a, button:enabled, input:enabled, select, textarea, summary, [role=treeitem], [role=menuitem], .lane-text'

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
      const target = titled(event.target)
      if (target) waiting = window.setTimeout(() => target.isConnected && show(tip, target), WAIT_MS)
    }
    let isByKey = false
    const onFocus = (event: FocusEvent) => {
      if (isByKey && !(event.target instanceof HTMLTextAreaElement)) showSoon(event)
    }
    const onBlur = () => {
      if (isByKey) hide() // a tap also moves the focus
    }
    const onKey = () => {
      isByKey = true
      hide()
    }
    const onPointerDown = (event: PointerEvent) => {
      isByKey = false
      if (event.pointerType === 'touch') showSoon(event)
      else hide()
    }
    const onPointerUp = (event: PointerEvent) => {
      clearTimeout(waiting)
      const target = titled(event.target)
      if (event.pointerType === 'touch' && target && !acts(event.target)) show(tip, target)
    }
    const listening = new AbortController()
    const options = { capture: true, signal: listening.signal }
    addEventListener('focusin', onFocus, options)
    addEventListener('focusout', onBlur, options)
    addEventListener('keydown', onKey, options)
    addEventListener('pointerdown', onPointerDown, options)
    addEventListener('pointerup', onPointerUp, options)
    addEventListener('pointercancel', () => clearTimeout(waiting), options)
    addEventListener('scroll', hide, options)
    return () => {
      clearTimeout(waiting)
      listening.abort()
    }
  }, [])
  return <div ref={box} class="tooltip" popover="manual" aria-hidden />
}

/** The element whose title describes a target: around it, or its label. */
function titled(target: EventTarget | null): Element | undefined {
  if (!(target instanceof Element)) return undefined
  const labels = target instanceof HTMLInputElement ? target.labels : null
  return target.closest('[title]') ?? [...(labels ?? [])].find((label) => label.title)
}

const acts = (target: EventTarget | null): boolean =>
  target instanceof Element && target.closest(ACTIONS) !== null

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
