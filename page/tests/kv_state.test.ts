import { describe, expect, it } from 'vitest'
import { kvStateText, spokenKvState } from '../src/model/kv_state'

const kv = (state: 'hot' | 'host' | 'partly' | 'cold', pinned = false) => ({ state, bytes: 0, pinned })

describe('where KV is', () => {
  it('has words for the tooltip', () => {
    expect(kvStateText(kv('cold'))).toBe('KV not cached, recomputed when needed')
    expect(kvStateText(kv('hot', true))).toBe('KV cached (pinned)')
  })

  it('is spoken of only where all of it is there', () => {
    expect(spokenKvState(kv('hot', true))).toBe('KV cached, pinned')
    expect(spokenKvState(kv('host'))).toBe('KV in host memory')
    for (const none of [kv('partly'), kv('cold'), undefined]) expect(spokenKvState(none)).toBeUndefined()
  })
})
