import { describe, expect, it } from 'vitest'
import { warmthSpoken, warmthWords } from '../src/model/warmth'

const kv = (state: 'hot' | 'host' | 'partly' | 'cold', pinned = false) => ({ state, bytes: 0, pinned })

describe('where KV is', () => {
  it('has words for the tooltip', () => {
    expect(warmthWords(kv('cold'))).toBe('KV not in memory, recomputed when needed')
    expect(warmthWords(kv('hot', true))).toBe('KV in memory (pinned)')
  })

  it('is spoken of only where all of it is there', () => {
    expect(warmthSpoken(kv('hot', true))).toBe('KV in memory, pinned')
    expect(warmthSpoken(kv('host'))).toBe('KV in host memory')
    for (const none of [kv('partly'), kv('cold'), undefined]) expect(warmthSpoken(none)).toBeUndefined()
  })
})
