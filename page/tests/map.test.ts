import { describe, expect, it } from 'vitest'
import { barLength, COLUMN, fitAll, TreeMap, tints, visibleBox } from '../src/model/map'
import { LoomTree } from '../src/model/tree'
import { wrap } from '../src/ui/tree/paint'
import { node } from './tree.test'

function tree(n = 40): LoomTree {
  const result = new LoomTree()
  result.put(
    Array.from({ length: n }, (_, i) => node(i, i ? Math.floor((i - 1) / 3) : null, { n_tokens: i })),
  )
  return result
}

describe('a map', () => {
  it('has a column a level, and no two nodes at one place', () => {
    const map = new TreeMap(tree(), 0)
    expect(map.places.size).toBe(40)
    for (const [depth, level] of map.levels.entries()) {
      for (const [i, place] of level.entries()) {
        expect(place.x).toBe(depth * COLUMN)
        if (i) expect(place.y - level[i - 1]!.y).toBeGreaterThanOrEqual(20)
      }
    }
    expect(new TreeMap(tree(), 99).places.size).toBe(0)
  })

  it('finds what is in a box, and what is at a point', () => {
    const map = new TreeMap(tree(), 0)
    expect([...map.within(map.box)]).toHaveLength(40)
    const one = map.places.get(17)!
    expect(map.at(one.x + 10, one.y + 3, 8)!.node).toBe(17)
    expect(map.at(one.x + 10, one.y + 13.5, 2)).toBeNull()
    const few = [...map.within({ x0: one.x, x1: one.x + 1, y0: one.y - 1, y1: one.y + 1 })]
    expect(few.length).toBeLessThan(5)
    expect(few).toContain(one)
  })

  it('is as long as its tokens, up to a bound', () => {
    expect(barLength(0)).toBeGreaterThan(0)
    expect(barLength(64)).toBeGreaterThan(barLength(16))
    expect(barLength(1e6)).toBeLessThan(COLUMN)
  })

  it('of thousands of lines fits into a view that is wider than high', () => {
    const map = new TreeMap(tree(5000), 0)
    const view = fitAll(map.box, 500, 800)
    const box = visibleBox(view, 500, 800)
    expect(box.y0).toBeLessThanOrEqual(map.box.y0)
    expect(box.y1).toBeGreaterThanOrEqual(map.box.y1)
    expect(view.across).toBeGreaterThan(view.scale)
  })

  it('tints nodes with values', () => {
    const loom = tree(4)
    loom.put([
      node(1, 0, { score: 2 }),
      node(2, 0, { score: 4 }),
      node(3, 0, { mean_p: null, mean_logprob: null }),
    ])
    const score = tints(loom, 'score')
    expect([1, 2, 3].map(score)).toEqual([0, 1, null])
    expect(tints(loom, 'probability')(3)).toBeNull()
    expect([0, 3].map(tints(loom, 'age'))).toEqual([0, 1])
  })

  it('is laid out for ten thousand nodes in a chain as well as in a tree', () => {
    const deep = new LoomTree()
    deep.put(Array.from({ length: 10_000 }, (_, i) => node(i, i ? i - 1 : null)))
    expect(new TreeMap(deep, 0).levels).toHaveLength(10_000)
    const large = tree(10_000)
    expect(new TreeMap(large, 0).places.size).toBe(10_000)
  })
})

describe('words on the map', () => {
  const measure = (part: string) => part.length
  it('break at blanks, or where there are none', () => {
    expect(wrap('one two three', 8, 3, measure)).toEqual(['one two', 'three'])
    expect(wrap('one two three four', 8, 1, measure)).toEqual(['one two…'])
    expect(wrap('aaaaaaaaaaaa', 5, 2, measure)).toEqual(['aaaaa', 'aaaa…'])
    expect(wrap('🦊🦊🦊', 3, 3, measure)).toEqual(['🦊', '🦊', '🦊'])
    expect(wrap('', 5, 2, measure)).toEqual([])
    const flags = '🇫🇷🇯🇵🇰🇷' // four units each
    expect(wrap(flags, 9, 1, measure)).toEqual(['🇫🇷…'])
    expect(wrap(flags, 6, 3, measure)).toEqual(['🇫🇷', '🇯🇵', '🇰🇷'])
  })
})
