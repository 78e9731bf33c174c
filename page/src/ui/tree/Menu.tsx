/** A menu at a place: its keys are shown, the arrows move in it, and what was focused is focused again. */
import { useLayoutEffect, useRef } from 'preact/hooks'

export interface MenuItem {
  label: string
  key?: string
  run: () => void
  disabled?: boolean
  /** A line above it. */
  begins?: boolean
}

interface MenuProps {
  label: string
  items: readonly MenuItem[]
  x: number
  y: number
  onClose: () => void
}

export function Menu({ label, items, x, y, onClose }: MenuProps) {
  const box = useRef<HTMLDivElement>(null)
  useLayoutEffect(() => {
    const element = box.current!
    const { width, height } = element.getBoundingClientRect()
    element.style.left = `${Math.max(4, Math.min(x, innerWidth - width - 4))}px`
    element.style.top = `${y + height + 4 > innerHeight ? Math.max(4, y - height) : y}px`
  }, [x, y])
  useLayoutEffect(() => {
    const before = document.activeElement
    move(box.current!, 0, 0)
    const away = (event: Event) => {
      if (!(event.target instanceof Node && box.current?.contains(event.target))) onClose()
    }
    addEventListener('pointerdown', away, true)
    addEventListener('resize', onClose)
    addEventListener('wheel', away, { passive: true })
    return () => {
      removeEventListener('pointerdown', away, true)
      removeEventListener('resize', onClose)
      removeEventListener('wheel', away)
      if (before instanceof HTMLElement && before.isConnected) before.focus({ preventScroll: true })
    }
  }, [])
  return (
    <div
      ref={box}
      class="menu"
      role="menu"
      tabIndex={-1}
      aria-label={label}
      onContextMenu={(event) => event.preventDefault()}
      onKeyDown={(event) => {
        event.stopPropagation() // the page's keys wait
        const by = { ArrowDown: 1, ArrowUp: -1 }[event.key]
        if (by) move(box.current!, by)
        else if (event.key === 'Home') move(box.current!, 0, 0)
        else if (event.key === 'End') move(box.current!, 0, -1)
        else if (event.key === 'Escape' || event.key === 'Tab') onClose()
        else return
        event.preventDefault()
      }}
    >
      {items.map((each) => (
        <button
          key={each.label}
          type="button"
          role="menuitem"
          tabIndex={-1}
          class={each.begins ? 'begins' : ''}
          disabled={each.disabled}
          onClick={() => {
            onClose()
            // Once the focus is back where it was.
            setTimeout(each.run)
          }}
        >
          <span class="grow">{each.label}</span>
          {each.key && <kbd>{each.key}</kbd>}
        </button>
      ))}
    </div>
  )
}

/** Focus the next item, or the one at a place. */
function move(box: HTMLElement, by: number, to?: number): void {
  const items = [...box.querySelectorAll<HTMLElement>('[role=menuitem]:not(:disabled)')]
  const now = items.indexOf(document.activeElement as HTMLElement)
  const next = to ?? (now + by + items.length) % items.length
  items.at(next)?.focus()
}
