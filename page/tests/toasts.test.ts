import { beforeEach, expect, it } from 'vitest'
import { standIn } from './stand_ins'

let notes: typeof import('../src/state/toasts')

beforeEach(async () => {
  standIn()
  notes = await import('../src/state/toasts')
})

it('offers to take back the last change only', () => {
  const undo = { label: 'Undo', run: () => {} }
  notes.toast('Removed 1 node', { action: undo, undoes: 4 })
  notes.toast('Something else')
  notes.overtaken(4)
  expect(notes.toasts.value).toHaveLength(2)
  notes.overtaken(5)
  expect(notes.toasts.value.map((each) => each.text)).toEqual(['Something else'])
})
