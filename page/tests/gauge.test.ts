import { beforeEach, expect, it, vi } from 'vitest'
import { standIn } from './stand_ins'

beforeEach(() => {
  standIn()
})

it('asks once more for whoever asks while an older answer is under way', async () => {
  const { api } = await import('../src/api/client')
  const { kv, readKv } = await import('../src/state/gauge')
  const answers: ((told: unknown) => void)[] = []
  const asked = vi
    .spyOn(api, 'kv')
    .mockImplementation(() => new Promise((told) => answers.push(told as never)))
  const first = readKv()
  const later = [readKv(), readKv()]
  expect(asked).toHaveBeenCalledTimes(1)
  answers[0]!({ data: [{ model: 'old' }] })
  await first
  await vi.waitFor(() => expect(asked).toHaveBeenCalledTimes(2))
  answers[1]!({ data: [{ model: 'new' }] })
  await Promise.all(later)
  expect(kv.value).toEqual([{ model: 'new' }])
  expect(asked).toHaveBeenCalledTimes(2)
})
