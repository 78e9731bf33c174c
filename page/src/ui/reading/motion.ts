/** The moves that explain: a fork, and a removal. Nothing moves where motion is not wanted. */
import { boxesOf, rangeOf } from './textPosition'

const PLACE_MS = 200
const EASING = 'cubic-bezier(0.2, 0, 0, 1)'
const isStill = () => matchMedia('(prefers-reduced-motion: reduce)').matches

/** The shared characters flash once, and the new text slides out of the token that it replaces. */
export function showFork(element: Element, shared: number, end: number): void {
  if (isStill()) return
  for (const box of boxesOf(rangeOf(element, 0, shared))) {
    const flash = createOverlay('flash', box)
    play(flash, [{ opacity: 0 }, { opacity: 1, offset: 0.3 }, { opacity: 0 }], 2 * PLACE_MS)
  }
  const range = rangeOf(element, shared, end)
  const box = boxesOf(range)[0]
  if (!box) return
  const ghost = createOverlay('ghost', box)
  ghost.textContent = range.toString()
  ghost.style.color = getComputedStyle(element).color
  // The characters wait, as they are now and as the cursor's own element, which arrives with the tokens.
  if ('Highlight' in window) CSS.highlights.set('arriving', new Highlight(range))
  element.toggleAttribute('data-arriving', true)
  play(ghost, [{ opacity: 0, transform: 'translateY(-14px)' }, { opacity: 1 }], PLACE_MS, () => {
    CSS.highlights?.delete('arriving')
    element.removeAttribute('data-arriving')
  })
}

/** Prepare the removal of an element. Returns a function that folds it into the toast with its Undo. */
export function seizeRemoval(element: Element): () => void {
  const box = element.getBoundingClientRect()
  const text = (element.textContent ?? '').slice(0, 800)
  if (isStill() || !box.height || box.bottom < 0 || box.top > innerHeight) return () => {}
  return () => {
    const ghost = createOverlay('ghost leaving', box)
    ghost.style.maxHeight = `${Math.min(box.height, 240)}px`
    ghost.textContent = text
    const x = innerWidth / 2 - (box.left + box.width / 2)
    const y = innerHeight - 60 - box.top
    play(
      ghost,
      [{ opacity: 0.9 }, { opacity: 0, transform: `translate(${x}px, ${y}px) scale(0.3)` }],
      PLACE_MS,
    )
  }
}

function createOverlay(name: string, box: DOMRect): HTMLElement {
  const element = document.createElement('div')
  element.className = `reading-motion ${name}`
  element.ariaHidden = 'true'
  Object.assign(element.style, {
    left: `${box.left}px`,
    top: `${box.top}px`,
    width: `${box.width}px`,
    height: `${box.height}px`,
  })
  document.body.append(element)
  return element
}

function play(element: HTMLElement, frames: Keyframe[], ms: number, then?: () => void): void {
  const end = () => {
    element.remove()
    then?.()
  }
  element.animate(frames, { duration: ms, easing: EASING, fill: 'forwards' }).finished.then(end, end)
}
