import { describe, expect, it } from 'vitest'
import { commonBeginning, comparedNodes } from '../src/model/compare'
import { LoomTree } from '../src/model/tree'
import { node } from './tree.test'

describe('a comparison', () => {
  it('has the selected nodes, else the children, else the siblings', () => {
    const tree = new LoomTree()
    tree.put([node(0, null), node(1, 0), node(2, 0), node(3, 1), node(4, 1), node(5, 3)])
    expect(comparedNodes(tree, 1, new Set([5, 2]))).toEqual([5, 2])
    expect(comparedNodes(tree, 1, new Set([5]))).toEqual([3, 4])
    expect(comparedNodes(tree, 4, new Set())).toEqual([3, 4])
    expect(comparedNodes(tree, 5, new Set())).toEqual([])
  })

  it('has six nodes at most, with the current one', () => {
    const tree = new LoomTree()
    tree.put([node(0, null), ...Array.from({ length: 9 }, (_, i) => node(i + 1, 0))])
    expect(comparedNodes(tree, 0, new Set())).toEqual([1, 2, 3, 4, 5, 6])
    expect(comparedNodes(tree, 8, new Set())).toEqual([3, 4, 5, 6, 7, 8])
  })

  it('begins to differ before a word', () => {
    expect(commonBeginning(['the red fox', 'the rest', 'the river'])).toBe(4)
    expect(commonBeginning(['the red', 'the red fox'])).toBe(7)
    expect(commonBeginning(['same', 'same'])).toBe(4)
    expect(commonBeginning(['one', 'two'])).toBe(0)
  })
})
