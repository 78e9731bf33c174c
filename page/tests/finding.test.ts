import { describe, expect, it } from 'vitest'
import { find, inUnits, NOTHING, nextHit, pattern, type Query, snippet } from '../src/model/finding'
import { LoomTree } from '../src/model/tree'
import { node } from './tree.test'

function tree(): LoomTree {
  const result = new LoomTree()
  result.put([
    node(0, null, { text: 'A fox.', mean_p: null, mean_logprob: null, finish_reason: null }),
    node(1, 0, { text: ' The Fox (a.b) ran', mean_logprob: Math.log(0.9) }),
    node(2, 1, { text: ' home', mean_p: null, mean_logprob: null, finish_reason: null }),
    node(3, 0, { text: ' a fox and a fox', bookmark: '', ended: true, mean_logprob: Math.log(0.2) }),
  ])
  return result
}

function findNodes(query: Partial<Query>): number[] {
  const texts = { tree: tree(), top: 0, prompt: '', isChat: false, isUnread: (each: number) => each === 3 }
  return find(texts, { ...NOTHING, ...query }).matches.map((each) => each.node)
}

describe('a search', () => {
  it('finds words as they are, large or small', () => {
    expect(findNodes({ text: 'fox' })).toEqual([0, 1, 3])
    expect(findNodes({ text: 'Fox', isCase: true })).toEqual([1])
    expect(findNodes({ text: '(a.b)' })).toEqual([1])
    expect(findNodes({ text: 'a.b' })).toEqual([1])
    expect(findNodes({ text: 'axb' })).toEqual([])
  })

  it('finds patterns, and says of a broken one that it is', () => {
    expect(findNodes({ text: '\\bfox\\b.*fox', isRegex: true })).toEqual([3])
    expect(() => pattern({ ...NOTHING, text: '(', isRegex: true })).toThrow('not complete')
    expect(findNodes({ text: '\\-', isRegex: true })).toEqual([]) // it is valid without the flag u only
  })

  it('knows kinds of nodes, and how likely they are', () => {
    expect(findNodes({ kinds: new Set(['bookmarked']) })).toEqual([3])
    expect(findNodes({ kinds: new Set(['human']) })).toEqual([2])
    expect(findNodes({ kinds: new Set(['model']) })).toEqual([1, 3])
    expect(findNodes({ kinds: new Set(['ended', 'unread']) })).toEqual([3])
    expect(findNodes({ low: 0.5 })).toEqual([1])
    expect(findNodes({ high: 0.5, text: 'fox' })).toEqual([3])
  })

  it('goes from hit to hit, round and round, from wherever one stands', () => {
    const hits = [0, 1, 3].map((each) => ({ node: each, text: '', spans: [] }))
    expect(nextHit(tree(), hits, 3, 1)).toBe(0)
    expect(nextHit(tree(), hits, 0, -1)).toBe(3)
    expect(nextHit(tree(), hits, 2, 1)).toBe(3)
    expect(nextHit(tree(), hits, 2, -1)).toBe(1)
    expect(nextHit(tree(), [], 2, 1)).toBeNull()
  })

  it('shows what stands around a hit, marked', () => {
    const text = `${'word '.repeat(30)}fox${' tail'.repeat(60)}`
    const pieces = snippet({ node: 1, text, spans: [[150, 153]] })
    expect(pieces[0]!.text).toBe('…')
    expect(pieces.find((each) => each.isMarked)!.text).toBe('fox')
    expect(pieces.at(-1)!.text).toBe('…')
    expect(pieces.map((each) => each.text).join('').length).toBeLessThan(170)
  })

  it('counts as the server does: by characters', () => {
    expect(inUnits('🦊 fox', [[2, 5]])).toEqual([[3, 6]])
    expect(inUnits('a fox', [[2, 5]])).toEqual([[2, 5]])
  })

  it('finds the one in ten thousand texts', () => {
    const large = new LoomTree()
    large.put(
      Array.from({ length: 10_000 }, (_, i) => node(i, i ? i - 1 : null, { text: `text ${i}. `.repeat(20) })),
    )
    const texts = { tree: large, top: 0, prompt: '', isChat: false, isUnread: () => false }
    expect(find(texts, { ...NOTHING, text: '9999' }).matches).toHaveLength(1)
  })
})
