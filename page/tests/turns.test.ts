import { describe, expect, it } from 'vitest'
import type { Loom, Node } from '../src/api/client'
import { LoomTree } from '../src/model/tree'
import { groupEqualLeaves, shownText, turnsOf } from '../src/model/turns'

const node = (number: number, parent: number | null, more: Partial<Node> = {}) =>
  ({ node: number, id: `${number}`, parent, children: [], text: `t${number}`, ...more }) as Node
const loom = { prompt: 'Hi' } as Loom

describe('a path', () => {
  it('of a chat is turns, of a text one', () => {
    const tree = new LoomTree()
    tree.put([node(0, null), node(1, 0), node(2, 1), node(3, 2, { said: 'So?' }), node(4, 3)])
    const path = tree.path(4)
    expect(turnsOf(tree, path, true).map((each) => [each.who, each.nodes])).toEqual([
      ['you', [0]],
      ['model', [1, 2]],
      ['you', [3]],
      ['model', [4]],
    ])
    expect(turnsOf(tree, path, false)).toEqual([{ who: 'text', nodes: path }])
  })
  it('hides the template unless it is wanted', () => {
    const root = node(0, null, { text: '<|bos|><|user|>Hi<|end|>' })
    expect(shownText(root, loom, false)).toBe('Hi')
    expect(shownText(root, loom, true)).toBe(root.text)
    expect(shownText(node(1, 0, { said: 'So?', text: '<|user|>So?' }), loom, false)).toBe('So?')
    expect(shownText(node(0, null, { text: 'Other' }), loom, false)).toBe('Other')
  })
})

it('equal children without children are one row', () => {
  const tree = new LoomTree()
  const texts = ['a', 'b', 'a', 'a', 'b']
  tree.put([node(0, null), ...texts.map((text, i) => node(i + 1, 0, { text })), node(9, 5)])
  expect(groupEqualLeaves(tree, tree.children(0))).toEqual([[1, 3, 4], [2], [5]])
})
