/** Short notes at the foot of the page: what was done, with its undo, or what went wrong. */
import { signal } from '@preact/signals'
import { ApiError } from '../api/client'

export interface ToastAction {
  label: string
  key?: string
  run: () => void
}
export interface Toast {
  id: number
  kind: 'note' | 'error'
  text: string
  /** The next step for the user. */
  detail: string
  action: ToastAction | null
  /** The revision that its action takes back; once something else is done, that is not what it would do. */
  undoes: number | null
  /** Ways out of what went wrong, the likeliest first. */
  offers: ToastAction[]
  /** Technical details, folded: the request, the code. */
  more: string
  /** Runs when it is dismissed by hand. */
  onDismiss: (() => void) | null
}

export const toasts = signal<Toast[]>([])
let last = 0
const STAYS_S = 8
const ERROR_STAYS_S = 60
const AT_ONCE = 3

const NOTHING: Omit<Toast, 'id' | 'text'> = {
  kind: 'note',
  detail: '',
  action: null,
  undoes: null,
  offers: [],
  more: '',
  onDismiss: null,
}

export function toast(text: string, more: Partial<Omit<Toast, 'id' | 'text'>> = {}): number {
  // A repeated text replaces its earlier toast.
  const others = toasts.peek().filter((each) => each.text !== text)
  const id = ++last
  toasts.value = [...others.slice(1 - AT_ONCE), { ...NOTHING, ...more, id, text }]
  // Questions stay until they are answered.
  if (!more.offers?.length)
    setTimeout(() => dismiss(id), 1000 * (more.kind === 'error' ? ERROR_STAYS_S : STAYS_S))
  return id
}

/** Remove the toasts that offer to undo a revision before `rev`. */
export function withdrawUndo(rev: number): void {
  const left = toasts.peek().filter((each) => each.undoes === null || each.undoes >= rev)
  if (left.length < toasts.peek().length) toasts.value = left
}

/** Remove all errors. Called when the user leaves a loom. */
export function dismissErrors(): void {
  toasts.value = toasts.peek().filter((each) => each.kind !== 'error')
}

export function dismiss(id: number): void {
  toasts.value = toasts.peek().filter((each) => each.id !== id)
}

/** Show an error: the server's message, the hint, and the request's id. */
export function failed(error: unknown): void {
  if (error instanceof DOMException && error.name === 'AbortError') return
  if (error instanceof ApiError) {
    if (error.isAway) return // the status bar says so for as long as it lasts
    toast(sentence(error.message), { kind: 'error', detail: sentence(error.hint), more: detailsOf(error) })
    return
  }
  console.error(error)
  toast(error instanceof Error ? error.message : String(error), { kind: 'error' })
}

/** The status, the code, the details and the request of an error. */
export function detailsOf(error: Pick<ApiError, 'status' | 'code' | 'details' | 'requestId'>): string {
  const details = Object.entries(error.details).map(([name, value]) => `${name} ${String(value)}`)
  return [
    [error.status || '', error.code].filter(Boolean).join(' '),
    ...details,
    error.requestId && `request ${error.requestId}`,
  ]
    .filter(Boolean)
    .join(' · ')
}

/** Capitalize a message of the server, except a command at its beginning. */
export function sentence(text: string): string {
  return text && /^(?!weft )[a-z]+ /.test(text) ? text[0]!.toUpperCase() + text.slice(1) : text
}
