/** A menu above the page: the focus moves into it, and returns when the menu closes. */
import type { LucideIcon } from 'lucide-preact'
import { Fragment } from 'preact'
import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import './menu.css'

export interface MenuItem {
  label: string
  key?: string
  run: () => void
  disabled?: boolean
  /** Draw a line above it. */
  begins?: boolean
}

interface MenuProps {
  label: string
  items: readonly MenuItem[]
  /** A point, or the button below which the menu opens. */
  at: { x: number; y: number } | Element
  onClose: () => void
}

const EDGE = 4 // pixels between the menu and the edge of the screen

export function Menu({ label, items, at, onClose }: MenuProps) {
  const box = useRef<HTMLDivElement>(null)
  useLayoutEffect(() => {
    const before = document.activeElement
    open(box.current!, at)
    const closeOutside = (event: Event) => {
      const target = event.target as Node
      const isInside = [box.current, at].some((each) => each instanceof Node && each.contains(target))
      if (!isInside) onClose()
    }
    // A popover that closes by itself would close when the finger that opened it is lifted.
    addEventListener('pointerdown', closeOutside, true)
    addEventListener('wheel', closeOutside, { passive: true })
    addEventListener('resize', onClose)
    return () => {
      removeEventListener('pointerdown', closeOutside, true)
      removeEventListener('wheel', closeOutside)
      removeEventListener('resize', onClose)
      if (before instanceof HTMLElement && before.isConnected) before.focus({ preventScroll: true })
    }
  }, [])
  const onKey = (event: KeyboardEvent) => {
    event.stopPropagation() // the page's keys wait
    const buttons = itemsOf(box.current!)
    const next = nextItem(buttons, event)
    if (event.key === 'Escape' || event.key === 'Tab') onClose()
    else if (next !== undefined) buttons.at(next)?.focus()
    else return
    event.preventDefault()
  }
  return (
    <div
      ref={box}
      class="menu"
      popover="manual"
      role="menu"
      tabIndex={0}
      aria-label={label}
      onContextMenu={(event) => event.preventDefault()}
      onKeyDown={onKey}
    >
      {items.map((item) => (
        <Fragment key={item.label}>
          {item.begins && <hr />}
          <button
            type="button"
            role="menuitem"
            tabIndex={-1}
            disabled={item.disabled}
            onClick={() => {
              onClose()
              // After the focus has returned.
              setTimeout(item.run)
            }}
          >
            <span class="grow">{item.label}</span>
            {item.key && <kbd>{item.key}</kbd>}
          </button>
        </Fragment>
      ))}
    </div>
  )
}

/** Show the menu within the screen, with the focus on its first item. */
function open(box: HTMLElement, at: MenuProps['at']): void {
  box.showPopover()
  const { width, height } = box.getBoundingClientRect()
  const rect = at instanceof Element ? at.getBoundingClientRect() : null
  const { x, y } = rect ? { x: rect.left, y: rect.bottom + EDGE } : (at as { x: number; y: number })
  box.style.left = `${Math.max(EDGE, Math.min(x, innerWidth - width - EDGE))}px`
  box.style.top = `${Math.max(EDGE, Math.min(y, innerHeight - height - EDGE))}px`
  ;(itemsOf(box)[0] ?? box).focus()
}

const itemsOf = (box: HTMLElement) => [...box.querySelectorAll<HTMLElement>('[role=menuitem]:not(:disabled)')]

/** The item that a key moves to: arrows, Home, End, or the first character of a label. */
function nextItem(buttons: readonly HTMLElement[], event: KeyboardEvent): number | undefined {
  const now = buttons.indexOf(document.activeElement as HTMLElement)
  const to = { ArrowDown: (now + 1) % buttons.length, ArrowUp: Math.max(now, 0) - 1, Home: 0, End: -1 }
  if (event.key in to) return to[event.key as keyof typeof to]
  if (event.ctrlKey || event.metaKey || event.altKey || event.key.length > 1 || event.key === ' ') return
  const order = [...buttons.keys()].map((each) => (now + 1 + each) % buttons.length)
  return order.find((each) => buttons[each]!.textContent.toLowerCase().startsWith(event.key.toLowerCase()))
}

interface MenuButtonProps {
  icon: LucideIcon
  label: string
  items: () => readonly MenuItem[]
}

/** An icon that opens a menu below itself, and closes it. */
export function MenuButton({ icon: Icon, label, items }: MenuButtonProps) {
  const [isOpen, setOpen] = useState(false)
  const button = useRef<HTMLButtonElement>(null)
  return (
    <>
      <button
        ref={button}
        type="button"
        class="icon-button"
        title={label}
        aria-label={label}
        aria-haspopup="menu"
        aria-expanded={isOpen}
        onClick={() => setOpen(!isOpen)}
      >
        <Icon size={16} aria-hidden />
      </button>
      {isOpen && <Menu label={label} items={items()} at={button.current!} onClose={() => setOpen(false)} />}
    </>
  )
}
