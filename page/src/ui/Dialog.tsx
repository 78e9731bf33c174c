/** The dialog of the page, on the platform's: modal, with the focus inside it. */

import { X } from 'lucide-preact'
import type { ComponentChildren } from 'preact'
import { useLayoutEffect, useRef } from 'preact/hooks'
import { dialogs, overlay } from '../state/view'
import { IconButton } from './Button'
import { Toasts } from './Toasts'
import './dialog.css'

interface DialogProps {
  title: string
  children: ComponentChildren
  onClose?: () => void
  width?: number
  class?: string
}

export const closeOverlay = () => {
  overlay.value = null
}

/** Escape and a click outside close the dialog. The focus starts at `autofocus` or the first field, and returns at the end. */
export function Dialog({ title, children, onClose = closeOverlay, width = 520, ...rest }: DialogProps) {
  const box = useRef<HTMLDialogElement>(null)
  const me = useRef(Symbol(title)).current
  // In the layout effect, so that the next key already goes to the dialog.
  useLayoutEffect(() => {
    const dialog = box.current!
    const before = document.activeElement
    dialog.showModal()
    const body = dialog.querySelector<HTMLElement>('.body')!
    const first =
      dialog.querySelector<HTMLElement>('[autofocus]') ??
      body.querySelector<HTMLElement>('input, select, textarea, button')
    if (!first)
      body.tabIndex = 0 // arrow keys scroll it
    ;(first ?? body).focus()
    dialogs.value = [...dialogs.peek(), me]
    const keepFocus = () => {
      const focused = document.activeElement
      // A disabled or hidden element loses the focus only at the next frame.
      const isKept =
        focused && focused !== document.body && focused.checkVisibility() && !focused.matches(':disabled')
      if (isKept || dialogs.peek().at(-1) !== me) return
      body.tabIndex = Math.max(body.tabIndex, -1)
      body.focus()
    }
    // No event says that the focused element was removed or disabled.
    const observer = new MutationObserver(keepFocus)
    observer.observe(dialog, { childList: true, subtree: true, attributeFilter: ['disabled', 'hidden'] })
    return () => {
      observer.disconnect()
      dialogs.value = dialogs.peek().filter((each) => each !== me)
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
        <div class="body">{children}</div>
      </div>
      {dialogs.value.at(-1) === me && <Toasts />}
    </dialog>
  )
}
