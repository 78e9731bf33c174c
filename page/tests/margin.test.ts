import { describe, expect, it } from 'vitest'
import { placeNotes } from '../src/model/margin'

const note = (node: number, top: number, height = 20, isFirm = false) => ({ node, top, height, isFirm })

describe('notes in the margin', () => {
  it('stand at their lines, or a little below', () => {
    expect([...placeNotes([note(0, 0, 20, true), note(1, 30, 40, true), note(2, 60)])]).toEqual([
      [0, 0],
      [1, 30],
      [2, 70],
    ])
  })

  it('leave out what has no room, never who speaks and never the last', () => {
    const crowd = Array.from({ length: 500 }, (_, i) => note(i, 30 * Math.floor(i / 9)))
    const shown = placeNotes(crowd)
    expect(shown.size).toBeLessThan(120)
    expect(shown.has(499)).toBe(true)
    for (const [node, top] of shown) expect(top - crowd[node]!.top).toBeLessThanOrEqual(24)
    const tops = [...shown.values()]
    expect(tops.every((top, i) => i === 0 || top - tops[i - 1]! >= 20)).toBe(true)
    expect([...placeNotes([note(0, 0, 40, true), note(1, 0), note(2, 0)]).keys()]).toEqual([0, 2])
  })
})
