import { describe, expect, it } from 'vitest'
import { call, provide, provideAll } from '../src/state/handlers'

describe('handlers of actions', () => {
  it('without a provider return undefined', () => {
    expect(call('digit', 3)).toBeUndefined()
  })

  it('call the newest provider, and the one before it after an undo', () => {
    const first = provide('digit', () => false)
    const second = provide('digit', () => true)
    expect(call('digit', 1)).toBe(true)
    second()
    expect(call('digit', 1)).toBe(false)
    first()
    expect(call('digit', 1)).toBeUndefined()
  })

  it('keep the newest provider when an older one is undone', () => {
    const undo = provideAll({ place: () => false, hit: () => false })
    const other = provide('place', () => true)
    undo()
    expect(call('place')).toBe(true)
    expect(call('hit', 1)).toBeUndefined()
    other()
  })
})
