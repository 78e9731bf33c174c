import { beforeEach, expect, it, vi } from 'vitest'
import { installFakes } from './fakes'

beforeEach(() => {
  installFakes()
})

it('reads again after a call during a pending read', async () => {
  const { api } = await import('../src/api/client')
  const { kv, readKv } = await import('../src/state/kvUsage')
  const answers: ((reply: unknown) => void)[] = []
  const request = vi
    .spyOn(api, 'kv')
    .mockImplementation(() => new Promise((resolve) => answers.push(resolve as never)))
  const first = readKv()
  const later = [readKv(), readKv()]
  expect(request).toHaveBeenCalledTimes(1)
  answers[0]!({ data: [{ model: 'old' }] })
  await first
  await vi.waitFor(() => expect(request).toHaveBeenCalledTimes(2))
  answers[1]!({ data: [{ model: 'new' }] })
  await Promise.all(later)
  expect(kv.value).toEqual([{ model: 'new' }])
  expect(request).toHaveBeenCalledTimes(2)
})
