import { describe, expect, it } from 'vitest'
import { warmthSpoken, warmthWords } from '../src/model/warmth'

const kv = (state: 'hot' | 'host' | 'partly' | 'cold', pinned = false) => ({ state, bytes: 0, pinned })

describe('where KV is', () => {
  it('has words for the tooltip', () => {
    expect(warmthWords(kv('cold'))).toBe('KV not cached: computed when needed')
    expect(warmthWords(kv('hot', true))).toBe('KV cached: nothing is computed again (pinned)')
  })

  it('is spoken of only where all of it is there', () => {
    expect(warmthSpoken(kv('hot', true))).toBe('KV cached, pinned')
    expect(warmthSpoken(kv('host'))).toBe('KV cached in host memory')
    for (const none of [kv('partly'), kv('cold'), undefined]) expect(warmthSpoken(none)).toBeUndefined()
  })
})
