/** A formula as MathML. Temml builds elements, and loads with the first formula. */
import { useLayoutEffect, useRef, useState } from 'preact/hooks'

type Temml = typeof import('temml')['default']
let temml: Temml | null = null

interface MathsProps {
  source: string
  isBlock: boolean
  raw: string
}

export function Maths({ source, isBlock, raw }: MathsProps) {
  const element = useRef<HTMLSpanElement>(null)
  const [isReady, setReady] = useState(temml !== null)
  useLayoutEffect(() => {
    if (isReady) return
    let isOver = false
    import('temml').then(
      (loaded) => {
        temml = loaded.default
        if (!isOver) setReady(true)
      },
      () => {}, // the source is shown
    )
    return () => {
      isOver = true
    }
  }, [isReady])
  useLayoutEffect(() => {
    const target = element.current
    if (!target || !temml) return
    try {
      // Without trust no command makes links, images or classes.
      temml.render(source, target, { displayMode: isBlock, throwOnError: true, trust: false })
    } catch {
      target.textContent = raw
    }
  }, [isReady, source, isBlock, raw])
  return <span ref={element} class={isBlock ? 'maths is-block' : 'maths'} title={source} />
}
