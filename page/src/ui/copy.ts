/** Put a text on the clipboard, and say so. Returns whether it is there. */
import { toast } from '../state/toasts'

export async function copyText(text: string, what: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
  } catch {
    // Only pages of this machine, or over https, have a clipboard of their own.
    const area = document.createElement('textarea')
    area.value = text
    area.readOnly = true
    area.className = 'visually-hidden'
    // Behind an open dialog nothing can be selected.
    ;([...document.querySelectorAll('dialog[open]')].at(-1) ?? document.body).append(area)
    area.select()
    const done = document.execCommand('copy')
    area.remove()
    if (!done) {
      toast('The browser does not allow the page to copy.', { kind: 'error' })
      return false
    }
  }
  toast(`Copied ${what}`)
  return true
}
