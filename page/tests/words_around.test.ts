import { describe, expect, it } from 'vitest'
import { formatOf, inOrder } from '../src/model/formats'
import { percent, shareReused, timesShared } from '../src/model/kv_savings'
import { nextOperations, operationText } from '../src/model/operation'
import { loading } from '../src/model/progress'
import { relativeTime } from '../src/model/relative_time'
import { samples } from '../src/model/samples'
import { beginning, ending, formatCount, isRightToLeft, oneLine } from '../src/model/words'

const kv = {
  kv_bytes: 10,
  kv_bytes_unshared: 75,
  kv_budget_bytes: null,
  reused: 0,
  prefilled: 0,
  saved_s: null,
}
const did = { n_added: 0, n_changed: 0, n_removed: 0, state: 'done' }

describe('what stands around the panes', () => {
  it('offers a prompt and three others that the model answers well', () => {
    const tiny = samples({ source: 'tiny', has_chat_template: true }, true)
    expect(tiny.first).toBe('Tell me a story about a fox.')
    expect(tiny.others).toHaveLength(3)
    const other = { source: 'org/model', has_chat_template: true }
    expect(samples(other, true).first).not.toBe(samples(other, false).first)
    expect(samples(other, false).others).toHaveLength(3)
  })

  it('says how far a model is loaded, in bytes where they are bytes', () => {
    expect(loading({ phase: 'download', done: 2_500_000, total: 5_000_000 })).toEqual({
      words: 'Downloading, 2.5 MB of 5.0 MB',
      share: 0.5,
    })
    expect(loading({ phase: 'load', done: 3, total: 12 })).toEqual({
      words: 'Reading the weights',
      share: 0.25,
    })
    expect(loading({ phase: 'load', done: 0, total: 1 }).share).toBeNull()
    expect(loading(null).share).toBeNull()
  })

  it('says what sharing saves only where it does', () => {
    expect(timesShared(kv)).toBe(7.5)
    expect(timesShared({ ...kv, kv_bytes_unshared: 10 })).toBeNull()
    expect(timesShared({ ...kv, kv_bytes: 0 })).toBeNull()
    expect(shareReused(kv)).toBeNull()
    expect(shareReused({ ...kv, reused: 99, prefilled: 1 })).toBe(0.99)
    expect(percent(0.9999)).toBe('99\u202f%')
    expect(percent(1)).toBe('100\u202f%')
  })

  it('separates thousands with commas', () => {
    expect([0, 999, 1000, 18902.4, 1234567].map(formatCount)).toEqual([
      '0',
      '999',
      '1,000',
      '18,902',
      '1,234,567',
    ])
  })

  it('says when a loom was changed as people do', () => {
    const now = new Date('2026-05-12T14:30:00')
    expect(relativeTime('2026-05-12T14:29:40', now)).toBe('just now')
    expect(relativeTime('2026-05-12T14:02:00', now)).toBe('28 min ago')
    expect(relativeTime('2026-05-12T09:02:00', now)).toBe('today 09:02')
    expect(relativeTime('2026-05-11T23:59:00', now)).toBe('yesterday 23:59')
    expect(relativeTime('2026-03-02T10:00:00', now)).toBe('2 Mar')
    expect(relativeTime('2024-03-02T10:00:00', now)).toBe('2 Mar 2024')
    expect(relativeTime('2026-05-12T14:30:20', now)).toBe('just now') // its clock is a little ahead
    expect(relativeTime('', now)).toBe('')
  })

  it('says what undo and redo would turn', () => {
    expect(operationText({ ...did, kind: 'remove', n_removed: 3 })).toBe('removal of 3 nodes')
    expect(operationText({ ...did, kind: 'grow', n_added: 1 })).toBe('growth of 1 node')
    for (const kind of ['bookmark', 'score', 'rating', 'note'])
      expect(operationText({ ...did, kind, n_changed: 1 })).toBe(kind)
    const log = [
      { ...did, kind: 'remove', n_removed: 2, rev: 3, state: 'undone' },
      { ...did, kind: 'grow', n_added: 4, rev: 2 },
      { ...did, kind: 'add', n_added: 1, rev: 1 },
    ]
    expect(nextOperations(log)).toEqual({ undo: 'growth of 4 nodes', redo: 'removal of 2 nodes' })
    expect(nextOperations([])).toEqual({ undo: null, redo: null })
  })

  it('lists formats as people look for them, those of packages last', () => {
    expect(inOrder(['json', 'mine', 'text'])).toEqual(['text', 'json', 'mine'])
    expect(formatOf('text').scope).toBe('path')
    expect(formatOf('pairs').unsupported).toEqual(['path'])
    expect(formatOf('mine').label).toBe('mine')
  })
})

describe('a text that is cut', () => {
  const family = '👩‍👩‍👧‍👦'
  it('keeps a grapheme complete', () => {
    expect(beginning('abc', 2)).toBe('ab')
    expect(beginning('abc', 3)).toBe('abc')
    expect(beginning(`ab${family}c`, 5)).toBe('ab')
    expect(beginning(`${family}c`, family.length)).toBe(family)
    expect(beginning('नमस्ते', 5)).toBe('नम')
    expect(beginning('e\u0301e\u0301', 3)).toBe('e\u0301')
    expect(ending(`c${family}ab`, 5)).toBe('ab')
    expect(ending('abc', 2)).toBe('bc')
    expect(ending('abc', 9)).toBe('abc')
    expect(oneLine(`${'a '.repeat(9)}${family}`, 22)).toBe(`${'a '.repeat(9)}…`)
  })

  it('is cut inside an endless grapheme, but not inside a pair', () => {
    expect(beginning(`e${'\u0301'.repeat(400)}`, 20)).toHaveLength(20)
    expect(beginning(family, 1)).toBe('')
    expect(beginning(family, 2)).toBe('👩')
  })

  it('runs in the direction of its first strong character', () => {
    expect(isRightToLeft(' «أين»')).toBe(true)
    expect(isRightToLeft('12 (שועל) fox')).toBe(true)
    expect(isRightToLeft('fox שועל')).toBe(false)
    expect(isRightToLeft('狐 שועל')).toBe(false)
    expect(isRightToLeft('12 …')).toBe(false)
  })
})
