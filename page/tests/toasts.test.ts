import { beforeEach, expect, it, vi } from 'vitest'
import { installFakes } from './fakes'

let notes: typeof import('../src/state/toasts')

beforeEach(async () => {
  installFakes()
  notes = await import('../src/state/toasts')
})

it('offers to take back the last change only', () => {
  const undo = { label: 'Undo', run: () => {} }
  notes.toast('Removed 1 node', { action: undo, undoes: 4 })
  notes.toast('Something else')
  notes.withdrawUndo(4)
  expect(notes.toasts.value).toHaveLength(2)
  notes.withdrawUndo(5)
  expect(notes.toasts.value.map((each) => each.text)).toEqual(['Something else'])
})

it('removes errors when another loom is opened, and after a minute', () => {
  vi.useFakeTimers()
  notes.toast('Not possible', { kind: 'error' })
  notes.toast('Removed 1 node')
  notes.dismissErrors()
  expect(notes.toasts.value.map((each) => each.text)).not.toContain('Not possible')
  notes.toast('Not possible', { kind: 'error' })
  vi.advanceTimersByTime(61_000)
  expect(notes.toasts.value.map((each) => each.text)).not.toContain('Not possible')
  vi.useRealTimers()
})
