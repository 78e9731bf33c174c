import { describe, expect, it } from 'vitest'
import type { Node } from '../src/api/client'
import { sortValue } from '../src/model/sibling_order'
import { LoomTree } from '../src/model/tree'

export function node(number: number, parent: number | null, more: Partial<Node> = {}): Node {
  return {
    node: number,
    id: `n${number}`,
    parent,
    children: [],
    n_below: 0,
    text: `text ${number}`,
    n_tokens: 2,
    mean_p: 0.5,
    mean_logprob: -0.7,
    finish_reason: 'length',
    ended: false,
    ...more,
  }
}

function tree(): LoomTree {
  const result = new LoomTree()
  result.put([node(0, null), node(1, 0), node(2, 1), node(3, 1), node(4, 0)])
  return result
}

describe('a tree', () => {
  it('sorts siblings by the geometric mean of their probabilities', () => {
    const result = new LoomTree()
    const uneven = { mean_p: 0.75, mean_logprob: Math.log(0.5) / 2 }
    const even = { mean_p: 0.74, mean_logprob: Math.log(0.74) }
    result.put([node(0, null), node(1, 0, uneven), node(2, 0, even)])
    result.sortBy(sortValue('probability'))
    expect(result.children(0)).toEqual([2, 1])
  })

  it('walks parents first, children in order', () => {
    expect([...tree().preorder()]).toEqual([0, 1, 2, 3, 4])
    expect(tree().path(3)).toEqual([0, 1, 3])
    expect(tree().siblings(3)).toEqual([2, 3])
    expect(tree().leaves()).toEqual([2, 3, 4])
    expect(tree().below(0)).toBe(4)
  })

  it('forgets what stands below a removed node', () => {
    const loom = tree()
    loom.remove([1])
    expect([...loom.preorder()]).toEqual([0, 4])
    expect(loom.get(3)).toBeUndefined()
    expect(loom.below(0)).toBe(1)
  })

  it('takes a node that moved from its old parent', () => {
    const loom = tree()
    loom.put([node(3, 4)])
    expect([...loom.preorder()]).toEqual([0, 1, 2, 4, 3])
  })

  it('has children in the order that the server says', () => {
    const loom = tree()
    loom.order({ 1: [3, 2], 0: [4, 1, 9] })
    expect([...loom.preorder()]).toEqual([0, 4, 1, 3, 2])
  })

  it('finds branch points both ways', () => {
    const loom = tree()
    expect(loom.branchPoint(2, -1, (children) => children[0]!)).toBe(1)
    expect(loom.branchPoint(0, 1, (children) => children[0]!)).toBe(1)
    expect(loom.branchPoint(2, 1, (children) => children[0]!)).toBeNull()
  })
})
