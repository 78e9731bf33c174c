import { describe, expect, it } from 'vitest'
import type { Model } from '../src/api/client'
import {
  changedParams,
  comparison,
  curl,
  defaultsFor,
  python,
  pythonLiteral,
  repeatRequest,
  reproductionCall,
} from '../src/model/provenance'
import { node } from './tree.test'

const params = {
  n: 3, max_tokens: 20, temperature: 0.8, top_p: 1, top_k: 0, min_p: 0.05, typical_p: 1,
  repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0, penalty_last_n: null,
  logit_bias: {}, stop: ["don't"], seed: 317, constraint: { choice: ['yes', 'no'] },
  temperature_first: false, draw_rule: 2,
} // biome-ignore format: short

const grown = node(7, 0, { params, branch: 2 })

describe('a node', () => {
  it('lists its settings that are not neutral', () => {
    expect(changedParams(params)).toEqual([
      ['Temperature', '0.8'],
      ['Min-p', '0.05'],
      ['Stop at', '"don\'t"'],
      ['Output format', 'choice'],
    ])
  })

  it('is repeated with settings that differ from the model’s own defaults', () => {
    expect(repeatRequest(grown, { temperature: 0.8 })).toEqual({
      n: 1,
      seed: 317,
      first_branch: 2,
      max_tokens: 20,
      min_p: 0.05,
      stop: ["don't"],
      choices: ['yes', 'no'],
    })
    expect(repeatRequest(grown, { temperature: 0.6 })).toMatchObject({ temperature: 0.8 })
  })

  it('is repeated with DRY, XTC and top-nσ', () => {
    const drawn = {
      ...params, dry_multiplier: 0.8, dry_sequence_breakers: ['\n'], xtc_probability: 0, top_n_sigma: 1.5,
    } // biome-ignore format: short
    expect(repeatRequest(node(7, 0, { params: drawn, branch: 2 }), {})).toMatchObject({
      dry_multiplier: 0.8,
      dry_sequence_breakers: ['\n'],
      top_n_sigma: 1.5,
    })
    expect(repeatRequest(node(7, 0, { params: drawn, branch: 2 }), {})).not.toHaveProperty('xtc_probability')
  })

  it('is listed and repeated with its limits on tokens, and the format that they limit', () => {
    const limits = { allowed: [3, 4], bad_words: ['an owl'], min_tokens: 0, stop_ids: [0] }
    const limited = { ...params, constraint: { token_limits: limits, inner: { choice: ['yes', 'no'] } } }
    expect(changedParams(limited).slice(-4)).toEqual([
      ['Bad words', '"an owl"'],
      ['Stop token ids', '0'],
      ['Allowed token ids', '3 4'],
      ['Output format', 'choice'],
    ])
    expect(repeatRequest(node(7, 0, { params: limited, branch: 2 }), {})).toMatchObject({
      bad_words: ['an owl'],
      stop_token_ids: [0],
      allowed_token_ids: [3, 4],
      choices: ['yes', 'no'],
    })
    const minimum = { allowed: null, bad_words: [], min_tokens: 5, stop_ids: [] }
    const repeat = (constraint: object) =>
      repeatRequest(node(7, 0, { params: { ...params, constraint }, branch: 2 }), {})
    expect(repeat({ token_limits: minimum, inner: null })).toMatchObject({ min_tokens: 5 })
    expect(repeat({ token_limits: minimum, inner: null })).not.toHaveProperty('bad_words')
    expect(repeat({ token_limits: minimum, inner: { choice: ['a'] } })).toMatch('minimum')
    expect(repeat({ token_limits: { ...minimum, bad_words: [[5, 6]] }, inner: null })).toMatch('bad words')
  })

  it('takes the defaults of chats in a loom whose prompt went through a template', () => {
    const model = { defaults: { temperature: 1 }, chat_defaults: { temperature: 0.8 } } as unknown as Model
    expect(defaultsFor(model, true)).toEqual({ temperature: 0.8 })
    expect(defaultsFor(model, false)).toEqual({ temperature: 1 })
    expect(defaultsFor(null, true)).toEqual({})
  })
  it('that was stopped is grown as far as it came', () => {
    const stopped = node(7, 0, { params, branch: 2, finish_reason: 'cancelled', n_tokens: 5 })
    expect(repeatRequest(stopped, {})).toMatchObject({ max_tokens: 5 })
  })

  it('says why it cannot be grown again', () => {
    expect(repeatRequest(node(7, 0), {})).toBe('This text was written, not generated.')
    const odd = { ...params, constraint: { lazy: {} } }
    expect(repeatRequest(node(7, 0, { params: odd, branch: 0 }), {})).toMatch('lazy')
    const huge = { ...params, seed: 2 ** 60 }
    expect(repeatRequest(node(7, 0, { params: huge, branch: 0 }), {})).toMatch('seed')
  })

  it('is written for a shell and for Python', () => {
    const root = { prompt: 'Hi', template: true }
    const request = reproductionCall(grown, 'a loom', repeatRequest(grown, {}), root)
    expect(curl(request, 'http://x', false)).toContain("don'\\''t")
    expect(curl(request, 'http://x', true)).toContain('$WEFT_API_KEY')
    expect(python(request, 'http://x', false)).toContain('wait=True')
    expect(python(request, 'http://x', false)).toContain('with weft.Client("http://x") as client:')
    const written = reproductionCall(node(7, 3), 'l', repeatRequest(node(7, 3), {}), root)
    expect(python(written, 'http://x', false)).toContain('client.add("l", parent=3, text="text 7")')
    const message = node(7, 3, { text: '<|user|>Hi<|end|>', said: 'Hi' })
    expect(reproductionCall(message, 'l', repeatRequest(message, {}), root).body).toEqual({
      parent: 3,
      message: 'Hi',
    })
    const half = node(7, 3, { text: '\ufffd', token_ids: [228] })
    expect(reproductionCall(half, 'l', repeatRequest(half, {}), root).body).toEqual({
      parent: 3,
      token_ids: [228],
    })
  })
})

it('Python has its own words for what JSON has', () => {
  expect(pythonLiteral({ a: [true, null, 'é\n', 1.5] })).toBe('{"a": [True, None, "é\\n", 1.5]}')
})

it('tokens are compared', () => {
  expect(comparison([1, 2], [1, 2])).toBe('same')
  expect(comparison([1, 2], [1, 2, 3])).toBe('longer')
  expect(comparison([1, 2], [1, 3])).toBe('other')
  expect(comparison([1, 2], [1])).toBe('other')
})
