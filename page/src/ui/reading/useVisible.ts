/** Return true if an element is visible, or nearly. */
import type { RefObject } from 'preact'
import { useEffect, useState } from 'preact/hooks'

const callbacks = new WeakMap<Element, (isVisible: boolean) => void>()
let observer: IntersectionObserver | undefined

/** isWanted: false asks nothing, as most text never needs to know. */
export function useVisible(element: RefObject<HTMLElement>, isWanted: boolean): boolean {
  const [isVisible, setVisible] = useState(false)
  useEffect(() => {
    const target = element.current
    if (!isWanted || !target) return
    observer ??= new IntersectionObserver(
      (entries) => {
        for (const entry of entries) callbacks.get(entry.target)?.(entry.isIntersecting)
      },
      { rootMargin: '300px 0px' },
    )
    callbacks.set(target, setVisible)
    observer.observe(target)
    return () => {
      observer?.unobserve(target)
      callbacks.delete(target)
    }
  }, [isWanted])
  return isWanted && isVisible
}
