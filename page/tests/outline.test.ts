import { describe, expect, it } from 'vitest'
import { branchLines, indent, pathLine, ROW } from '../src/model/guides'
import { Outline, type Shown } from '../src/model/outline'
import { LoomTree } from '../src/model/tree'
import { node } from './tree.test'

/**
 * 0 with 1 and 4; 1 with 2 alone, 2 with 3 alone.
 * 3 with 5 and 6; 4 with 7 8 9 of one text.
 */
function tree(): LoomTree {
  const result = new LoomTree()
  const same = { text: 'the same' }
  result.put([
    node(0, null),
    node(1, 0),
    node(2, 1),
    node(3, 2),
    node(4, 0),
    node(5, 3),
    node(6, 3),
    node(7, 4, same),
    node(8, 4, same),
    node(9, 4, same),
  ])
  return result
}

const ALL: Shown = { top: 0, collapsed: new Set(), unfolded: new Set(), only: null }
const outlineOf = (shown: Partial<Shown> = {}, of = tree()) => new Outline(of, { ...ALL, ...shown })
const chains = (outline: Outline) => outline.rows.map((row) => row.chain)

describe('an outline', () => {
  it('has chains and equal siblings on one row each', () => {
    const outline = outlineOf()
    expect(chains(outline)).toEqual([[0], [1, 2, 3], [5], [6], [4], [7]])
    expect(outline.rows[5]!.same).toEqual([7, 8, 9])
    expect(outline.rows.map((row) => row.depth)).toEqual([0, 1, 2, 2, 1, 2])
    expect(outline.rows.map((row) => [row.at, row.of])).toEqual([
      [1, 1],
      [1, 2],
      [1, 2],
      [2, 2],
      [2, 2],
      [1, 1],
    ])
  })

  it('shows the current node of a row, else the first', () => {
    const outline = outlineOf()
    const row = outline.rows[outline.rowOf(2)]!
    expect(outline.shownNodeOf(row, 2)).toBe(2)
    expect(outline.shownNodeOf(row, 0)).toBe(1)
    expect(outline.shownNodeOf(outline.rows[5]!, 8)).toBe(8)
  })

  it('unfolds equal siblings, and knows bookmarked ones apart', () => {
    expect(chains(outlineOf({ unfolded: new Set([4]) })).slice(-3)).toEqual([[7], [8], [9]])
    const loom = tree()
    loom.put([node(8, 4, { text: 'the same', bookmark: '' })])
    expect(
      outlineOf({}, loom)
        .rows.slice(-2)
        .map((row) => row.same),
    ).toEqual([[7, 9], []])
  })

  it('leaves out what is folded, and finds its row all the same', () => {
    const outline = outlineOf({ collapsed: new Set([2, 4]) })
    expect(chains(outline)).toEqual([[0], [1, 2], [4]])
    expect(outline.rows.map((row) => row.isFolded)).toEqual([false, true, true])
    expect(outline.rowOf(6)).toBe(1)
    expect(outline.path(6)).toEqual([0, 1])
  })

  it('begins at a hoisted node, which has a row to itself', () => {
    expect(chains(outlineOf({ top: 1 }))).toEqual([[1], [2, 3], [5], [6]])
    expect(outlineOf({ top: 99 }).rows).toEqual([])
  })

  it('shows hits and what leads there, whatever is folded', () => {
    const outline = outlineOf({ only: new Set([2, 6]), collapsed: new Set([1]) })
    expect(chains(outline)).toEqual([[0], [1, 2], [3], [6]])
    expect(outline.rows[1]!.face).toBe(2)
    expect(chains(outlineOf({ only: new Set() }))).toEqual([[0]])
  })

  it('gives the nodes from one row to another, equal ones with them', () => {
    expect(outlineOf().range(6, 8)).toEqual([6, 4, 7, 8, 9])
    expect(outlineOf().range(8, 6)).toEqual([6, 4, 7, 8, 9])
  })

  it('is laid for ten thousand nodes, however deep', () => {
    const deep = new LoomTree()
    deep.put(Array.from({ length: 10_000 }, (_, i) => node(i, i ? i - 1 : null)))
    expect(outlineOf({}, deep).rows.length).toBe(2)
    const wide = new LoomTree()
    wide.put(Array.from({ length: 10_000 }, (_, i) => node(i, i ? Math.floor((i - 1) / 3) : null)))
    expect(outlineOf({}, wide).rows.length).toBe(10_000)
  })
})

describe('the lines of an outline', () => {
  const y = (row: number) => row * ROW + ROW / 2

  it('run along the full path without a break', () => {
    const outline = outlineOf()
    const d = pathLine(outline, outline.path(6))
    expect(d.match(/M/g)).toHaveLength(1)
    expect(d.startsWith(`M${indent(0)} ${y(0)}`)).toBe(true)
    expect(d.endsWith(`H${indent(2)}`)).toBe(true)
  })

  it('go on through rows whose ends are out of sight', () => {
    const outline = outlineOf()
    // Of rows 2 and 3 alone: from 1 to 4 a line passes.
    expect(branchLines(outline, 2, 4)).toContain(`M${indent(0)} ${y(1)}V${y(4) - 6}`)
    expect(branchLines(outline, 3, 4)).toContain(`M${indent(0)} ${y(1)}V${y(4) - 6}`)
  })

  it('of deep levels are not drawn through a crowd of rows', () => {
    const deep = new LoomTree()
    const nodes = [node(0, null)]
    for (let last = 0; nodes.length < 200; last = nodes.length - 2)
      nodes.push(node(nodes.length, last), node(nodes.length + 1, last))
    deep.put(nodes)
    const outline = outlineOf({}, deep)
    const verticals = (from: number) =>
      [...branchLines(outline, from, from + 20).matchAll(/M(\d+) \d+V/g)].map((each) => Number(each[1]))
    expect(Math.max(...verticals(4))).toBeGreaterThan(indent(3))
    // In the middle of all rows a hundred ancestors have more to come.
    expect(new Set(verticals(60).filter((x) => x > indent(8))).size).toBeLessThan(4)
    expect(new Set(verticals(60).filter((x) => x < indent(8))).size).toBe(8)
  })

  it('go in less the deeper, and at last no more', () => {
    const steps = Array.from({ length: 60 }, (_, i) => indent(i + 1) - indent(i))
    expect(steps).toEqual([...steps].sort((a, b) => b - a))
    expect(steps.at(-1)).toBe(0)
    expect(indent(1000)).toBeLessThan(180)
  })
})
