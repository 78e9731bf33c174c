import { beforeEach, describe, expect, it } from 'vitest'
import type { GrowRequest } from '../src/api/client'
import type { ConstraintKind } from '../src/model/fields'
import type { OpenLoom } from '../src/state/loom'
import type { Settings } from '../src/state/settings'
import { installFakes } from './fakes'

let settings: typeof import('../src/state/settings')
let session: typeof import('../src/state/session')
let kept: Map<string, string>

const loom = (id: string) => ({ id }) as OpenLoom

beforeEach(async () => {
  kept = installFakes().kept
  settings = await import('../src/state/settings')
  session = await import('../src/state/session')
})

describe('settings', () => {
  it('are the defaults, and what the open loom says otherwise', () => {
    session.open.value = loom('a')
    settings.set({ n: 8 })
    expect(settings.settings.value.n).toBe(8)
    expect(settings.hasOwn.value).toBe(true)
    session.open.value = loom('b')
    expect(settings.settings.value.n).toBe(4)
    settings.set({ temperature: 0.1 }, 'default')
    session.open.value = loom('a')
    expect(settings.settings.value).toMatchObject({ n: 8, temperature: 0.1 })
  })

  it('are those of all looms where none is open', () => {
    settings.set({ n: 2 })
    session.open.value = loom('a')
    expect(settings.settings.value.n).toBe(2)
    expect(settings.hasOwn.value).toBe(false)
  })

  it('go back to the defaults, of one loom alone', () => {
    session.open.value = loom('a')
    settings.set({ n: 8 })
    session.open.value = loom('b')
    settings.set({ n: 7 })
    settings.forgetOwn()
    expect(settings.settings.value.n).toBe(4)
    session.open.value = loom('a')
    expect(settings.settings.value.n).toBe(8)
  })

  it('are remembered by the browser', async () => {
    session.open.value = loom('a')
    settings.set({ n: 8 })
    settings.set({ top_k: 5 }, 'default')
    expect(JSON.parse(kept.get('weft.settings.looms')!)).toEqual({ a: { n: 8 } })
    expect(JSON.parse(kept.get('weft.settings')!)).toMatchObject({ top_k: 5, n: 4 })
  })

  it('of a chat start from the sampling of its model', () => {
    const chat_defaults = {
      temperature: 0.7,
      top_k: 40,
      min_p: 0.05,
      logit_bias: {},
      temperature_first: true,
      dry_sequence_breakers: ['.'],
    }
    const chatModel = { id: 'm', state: 'ready', is_default: true, has_chat_template: true, chat_defaults }
    session.server.value = { models: [chatModel] } as never
    expect(settings.settings.value).toMatchObject({
      n: 1,
      temperature: 0.7,
      top_k: 40,
      min_p: 0.05,
      top_p: 1,
      temperature_first: true,
      dry_sequence_breakers: ['.'],
    })
    settings.set({ top_k: 5 }, 'default')
    expect(settings.settings.value).toMatchObject({ temperature: 0.7, top_k: 5 })
    settings.forgetOwn('default')
    expect(settings.settings.value.top_k).toBe(40)
  })

  it('include every sampling parameter of the server', () => {
    // A parameter that the server adds is an error of types here until it has a field.
    type Unset = Exclude<keyof GrowRequest, keyof Settings | ConstraintKind>
    const reasons: Record<Unset, string> = {
      first_branch: 'of a repeated call',
      force: 'set by the action',
      model: 'models',
      on_disconnect: 'growth outlives the page',
      stream: 'events have their own connection',
      wait: 'as above',
    }
    const given = {
      min_tokens: 2,
      penalty_last_n: 8,
      bad_words: ['owl'],
      stop_token_ids: [0],
      allowed_token_ids: [3, 4],
    }
    const sent = settings.growRequest({ ...settings.NEUTRAL, ...given, seed: 1, stop: ['.'] })
    for (const name of Object.keys(reasons)) expect(sent).not.toHaveProperty(name)
    expect(sent).toMatchObject(given)
    for (const name of ['temperature_first', 'dry_sequence_breakers']) expect(sent).toHaveProperty(name)
  })

  it('with token ids do not grow with another model', () => {
    const models = ['m', 'o'].map((id) => ({ id, state: 'ready', is_default: id === 'm' }))
    session.server.value = { models } as never
    settings.set({ models: ['o'] })
    expect(settings.blocked.value).toBeNull()
    settings.set({ stop_token_ids: [1] })
    expect(settings.blocked.value).toMatch(/^Stop token ids: /)
  })

  it('leave unset values to the server', () => {
    const request = settings.growRequest(settings.NEUTRAL)
    const unset = ['seed', 'stop', 'min_tokens', 'bad_words', 'stop_token_ids', 'allowed_token_ids']
    for (const name of unset) expect(request).not.toHaveProperty(name)
    const noBreakers = { ...settings.NEUTRAL, dry_sequence_breakers: [] }
    expect(settings.growRequest(noBreakers)).toHaveProperty('dry_sequence_breakers', [])
    expect(settings.growRequest({ ...settings.NEUTRAL, seed: 0, stop: ['\n'] })).toMatchObject({
      seed: 0,
      stop: ['\n'],
    })
  })
})

describe('what the browser remembers', () => {
  it('is read again, with what is new filled in', async () => {
    const { read, write, remembered } = await import('../src/state/storage')
    write('old', { a: 1 })
    expect(read('old', { a: 0, b: 2 })).toEqual({ a: 1, b: 2 })
    const list = remembered<string[]>('list', ['x'])
    list.value = ['y']
    expect(remembered<string[]>('list', ['x']).value).toEqual(['y'])
  })

  it('is let go where it is broken or nothing can be kept', async () => {
    const { read, write } = await import('../src/state/storage')
    kept.set('weft.broken', '{')
    expect(read('broken', 5)).toBe(5)
    kept.set('weft.null', 'null')
    expect(read('null', { a: 1 })).toEqual({ a: 1 })
    globalThis.localStorage.setItem = () => {
      throw new DOMException('full', 'QuotaExceededError')
    }
    expect(() => write('x', 1)).not.toThrow()
  })
})
