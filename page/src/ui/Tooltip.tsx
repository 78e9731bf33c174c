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
      const target = titled(event.target)
      if (target) waiting = window.setTimeout(() => target.isConnected && show(tip, target), WAIT_MS)
    }
    let isByKey = false
    const onFocus = (event: FocusEvent) => {
      if (isByKey && !(event.target instanceof HTMLTextAreaElement)) showSoon(event)
    }
    const onKey = () => {
      isByKey = true
      hide()
    }
    const onPointer = (event: PointerEvent) => {
      isByKey = false
      if (event.pointerType === 'touch') showSoon(event)
      else hide()
    }
    const hides = ['focusout', 'scroll']
    const listening = new AbortController()
    const options = { capture: true, signal: listening.signal }
    addEventListener('focusin', onFocus, options)
    addEventListener('keydown', onKey, options)
    addEventListener('pointerdown', onPointer, options)
    for (const type of hides) addEventListener(type, hide, options)
    for (const type of ['pointerup', 'pointercancel'])
      addEventListener(type, () => clearTimeout(waiting), options)
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
