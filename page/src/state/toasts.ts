/** Short notes at the foot of the page: what was done, with its undo, or what went wrong. */
import { signal } from '@preact/signals'
import { ApiError } from '../api/client'

export interface Toast {
  id: number
  kind: 'note' | 'error'
  text: string
  detail: string
  action: { label: string; key?: string; run: () => void } | null
}

export const toasts = signal<Toast[]>([])
let last = 0
const STAYS_S = 8

export function toast(text: string, more: Partial<Omit<Toast, 'id' | 'text'>> = {}): number {
  const id = ++last
  toasts.value = [...toasts.peek().slice(-2), { id, kind: 'note', detail: '', action: null, ...more, text }]
  // What went wrong stays until it was read.
  if (more.kind !== 'error') setTimeout(() => dismiss(id), 1000 * STAYS_S)
  return id
}

export function dismiss(id: number): void {
  toasts.value = toasts.peek().filter((each) => each.id !== id)
}

/** Tell of an error: the server's own words, what to do, and the request's id. */
export function failed(error: unknown): void {
  if (error instanceof DOMException && error.name === 'AbortError') return
  if (error instanceof ApiError) {
    if (error.isAway) return // the status bar says so for as long as it lasts
    const id = error.requestId ? `Request ${error.requestId}` : ''
    toast(error.message, { kind: 'error', detail: [error.hint, id].filter(Boolean).join(' · ') })
    return
  }
  console.error(error)
  toast(error instanceof Error ? error.message : String(error), { kind: 'error' })
}
