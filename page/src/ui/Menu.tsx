/** A button with a list of what can be done, over the page while it is open. */
import type { LucideIcon } from 'lucide-preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { keyFor, run } from '../state/keys'
import './menu.css'

export interface MenuItem {
  label: string
  /** The id of a command in the table of keys, whose key is shown. */
  command?: string
  onChoose?: () => void
  disabled?: boolean
}

export function Menu({
  icon: Icon,
  label,
  items,
  ...rest
}: {
  icon: LucideIcon
  label: string
  items: MenuItem[]
  class?: string
}) {
  const [isOpen, setOpen] = useState(false)
  const box = useRef<HTMLDivElement>(null)
  const button = useRef<HTMLButtonElement>(null)
  useEffect(() => {
    if (!isOpen) return
    box.current!.querySelector<HTMLElement>('[role=menuitem]:not(:disabled)')?.focus()
    const away = (event: PointerEvent) => {
      if (!box.current?.contains(event.target as Node)) setOpen(false)
    }
    addEventListener('pointerdown', away)
    return () => removeEventListener('pointerdown', away)
  }, [isOpen])

  const onKeyDown = (event: KeyboardEvent) => {
    if (!isOpen) return
    const all = [...box.current!.querySelectorAll<HTMLElement>('[role=menuitem]:not(:disabled)')]
    const at = all.indexOf(document.activeElement as HTMLElement)
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key]
    if (to !== undefined) all[(to + all.length) % all.length]?.focus()
    else if (event.key === 'Escape') {
      setOpen(false)
      button.current?.focus()
    } else if (event.key === 'Tab') setOpen(false)
    else if (event.key !== 'Enter' && event.key !== ' ') return event.stopPropagation()
    if (event.key !== 'Tab' && event.key !== 'Enter' && event.key !== ' ') event.preventDefault()
    event.stopPropagation()
  }

  return (
    <div class={`menu ${rest.class ?? ''}`} ref={box} onKeyDown={onKeyDown}>
      <button
        ref={button}
        type="button"
        class="icon-button"
        aria-label={label}
        aria-haspopup="menu"
        aria-expanded={isOpen}
        title={label}
        onClick={() => setOpen(!isOpen)}
      >
        <Icon size={16} aria-hidden />
      </button>
      {isOpen && (
        <div class="menu-list" role="menu" aria-label={label}>
          {items.map((each) => (
            <button
              key={each.label}
              type="button"
              role="menuitem"
              class="row"
              tabIndex={-1}
              disabled={each.disabled}
              onClick={() => {
                setOpen(false)
                button.current?.focus()
                if (each.onChoose) each.onChoose()
                else if (each.command) void run(each.command)
              }}
            >
              <span class="grow">{each.label}</span>
              {each.command && <kbd>{keyFor(each.command)}</kbd>}
            </button>
          ))}
        </div>
      )}
    </div>
  )
}
