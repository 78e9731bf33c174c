import { beforeEach, expect, it } from 'vitest'
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
