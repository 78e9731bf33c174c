/** Segments of a text as one: each begins in the line that the one before has ended. */
import type { RefObject } from 'preact'
import { useEffect, useLayoutEffect } from 'preact/hooks'

export function useFlow(text: RefObject<HTMLElement>): void {
  const align = () => {
    for (const segment of text.current?.querySelectorAll<HTMLElement>('.segment + .segment') ?? [])
      join(segment.previousElementSibling as HTMLElement, segment)
  }
  useLayoutEffect(align)
  useEffect(() => {
    const observer = new ResizeObserver(align)
    if (text.current) observer.observe(text.current)
    document.fonts.addEventListener('loadingdone', align)
    return () => {
      observer.disconnect()
      document.fonts.removeEventListener('loadingdone', align)
    }
  }, [])
}

function join(before: HTMLElement, segment: HTMLElement): void {
  const x = endOf(before)
  const indent = x === null ? '' : `${x}px`
  if (segment.style.textIndent === indent) return
  segment.style.textIndent = indent
  segment.classList.toggle('joined', x !== null)
}

/** How far its last line goes; null where a new one begins anyway. */
function endOf(segment: HTMLElement): number | null {
  if (segment.lastElementChild?.matches('.editor')) return null
  const walker = document.createTreeWalker(segment, NodeFilter.SHOW_TEXT)
  let last = walker.lastChild() as Text | null
  for (let next = last; next; next = walker.lastChild() as Text | null) last = next
  if (!last?.length || last.data.endsWith('\n')) return null
  const range = document.createRange()
  range.setStart(last, last.length - 1)
  range.setEnd(last, last.length)
  const boxes = range.getClientRects()
  const box = boxes[boxes.length - 1]
  return box ? Math.round((box.right - segment.getBoundingClientRect().left) * 64) / 64 : null
}
