/** Whether an element is in sight, or nearly. */
import type { RefObject } from 'preact'
import { useEffect, useState } from 'preact/hooks'

const told = new WeakMap<Element, (isVisible: boolean) => void>()
let observer: IntersectionObserver | undefined

/** isWanted: false asks nothing, as most text never needs to know. */
export function useVisible(element: RefObject<HTMLElement>, isWanted: boolean): boolean {
  const [isVisible, setVisible] = useState(false)
  useEffect(() => {
    const target = element.current
    if (!isWanted || !target) return
    observer ??= new IntersectionObserver(
      (entries) => {
        for (const each of entries) told.get(each.target)?.(each.isIntersecting)
      },
      { rootMargin: '300px 0px' },
    )
    told.set(target, setVisible)
    observer.observe(target)
    return () => {
      observer?.unobserve(target)
      told.delete(target)
    }
  }, [isWanted])
  return isWanted && isVisible
}
