/** What lies above the page: one dialog at a time, with the focus inside it. */

import { X } from 'lucide-preact'
import type { ComponentChildren } from 'preact'
import { useLayoutEffect, useRef } from 'preact/hooks'
import { overlay } from '../state/view'
import { IconButton } from './Button'
import './overlay.css'

interface DialogProps {
  title: string
  children: ComponentChildren
  onClose?: () => void
  width?: number
  /** Where the focus begins; the first field otherwise. */
  class?: string
}

export const closeOverlay = () => {
  overlay.value = null
}

/** A modal dialog: Escape and a click outside close it, and the focus goes back where it was. */
export function Dialog({ title, children, onClose = closeOverlay, width = 520, ...rest }: DialogProps) {
  const box = useRef<HTMLDialogElement>(null)
  // Before the next key comes: that is meant for it.
  useLayoutEffect(() => {
    const dialog = box.current!
    const before = document.activeElement
    dialog.showModal()
    const first =
      dialog.querySelector<HTMLElement>('[autofocus]') ??
      dialog.querySelector<HTMLElement>('input, select, textarea, .body button') ??
      dialog.querySelector<HTMLElement>('.body') // arrow keys scroll it
    first?.focus()
    return () => {
      dialog.close()
      if (before instanceof HTMLElement && before.isConnected) before.focus()
    }
  }, [])
  return (
    <dialog
      ref={box}
      role="dialog"
      class={`dialog ${rest.class ?? ''}`}
      aria-label={title}
      style={{ width: `min(${width}px, calc(100vw - 32px))` }}
      onCancel={(event) => {
        event.preventDefault()
        onClose()
      }}
      onClick={(event) => event.target === box.current && onClose()}
    >
      <div class="dialog-in">
        <header class="row">
          <h2 class="grow cut">{title}</h2>
          <IconButton icon={X} label="Close" onClick={onClose} />
        </header>
        <div class="body" tabIndex={-1}>
          {children}
        </div>
      </div>
    </dialog>
  )
}
