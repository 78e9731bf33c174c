import { describe, expect, it } from 'vitest'
import { emptyLabel, label, marks, meanP, plainText, spokenLabel } from '../src/model/label'
import { node } from './tree.test'

const labelOf = (text: string, more = {}) => label(node(1, 0, { text, ...more }), '', false)

describe('what a node says of itself', () => {
  it('is its first words on one line', () => {
    expect(labelOf('  One\n\ntwo\tthree ')).toEqual({ text: 'One two three', isNote: false })
    expect(labelOf('w'.repeat(400)).text).toHaveLength(80)
    expect(Array.from(labelOf('🦊'.repeat(100)).text)).toHaveLength(80)
  })

  it('is in words where there is no text', () => {
    expect(labelOf('', { ended: true })).toEqual({ text: '(ended immediately)', isNote: true })
    expect(labelOf('').text).toBe('(empty)')
    expect([emptyLabel(true), emptyLabel(false)]).toEqual(['(ended immediately)', '(empty)'])
    expect(labelOf('', { growing: true }).text).toBe('growing')
    expect(labelOf(' \n')).toEqual({ text: '·⏎', isNote: true })
  })

  it('leaves out what a template of a chat puts around', () => {
    const root = node(0, null, { text: '<|bos|><|user|>Hello<|end|><|assistant|>' })
    expect(plainText(root, 'Hello', true)).toBe('Hello')
    expect(plainText(root, 'Hello', false)).toBe('Hello<|end|><|assistant|>')
    expect(plainText(node(1, 0, { text: '<|bos|>' }), '', false)).toBe('<|bos|>')
    expect(plainText(node(2, 1, { text: '<|end|><|user|>And<|end|>', said: 'And' }), '', true)).toBe('And')
    expect(plainText(node(2, 1, { text: 'a < b | c > d<|end|>' }), '', true)).toBe('a < b | c > d')
  })

  it('has signs for how it came about and how it ended', () => {
    expect(marks(node(1, 0, { finish_reason: 'cancelled', bookmark: '' }))).toEqual(['bookmark', 'stopped'])
    expect(marks(node(1, 0, { ended: true, finish_reason: 'stop' }))).toEqual(['ended'])
    expect(marks(node(1, 0, { mean_p: null, finish_reason: null }))).toEqual(['human'])
    expect(marks(node(1, 0, { growing: true, finish_reason: null }))).toEqual(['growing'])
    expect(marks(node(1, 0, { finish_reason: 'error' }))).toEqual(['failed'])
  })

  it('has the geometric mean of its tokens, also while it grows', () => {
    expect(meanP(node(1, 0, { mean_p: 0.9, mean_logprob: Math.log(0.25) }))).toBeCloseTo(0.25)
    expect(meanP(node(1, 0, { mean_p: 0.4, mean_logprob: null }))).toBe(0.4)
  })

  it('is heard with what its signs say', () => {
    const one = node(1, 0, { text: 'Once', bookmark: 'good', ended: true, finish_reason: 'stop' })
    expect(spokenLabel(one, label(one, '', false), 3, true, 4)).toBe(
      'Once, 4 times, 3 children, bookmarked, ended, label good, unread, average probability 50\u202f%',
    )
  })
})
