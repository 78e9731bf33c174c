import { describe, expect, it } from 'vitest'
import { segments } from '../src/model/segments'

const word = (n: number) => ` ${'word '.repeat(n).trim()}`

describe('segments of a text', () => {
  it('are one while it is short', () => {
    expect(segments([])).toEqual([])
    expect(segments(['a', 'b'])).toEqual([[0, 1]])
  })
  it('stay where they are when it grows', () => {
    const texts = Array.from({ length: 40 }, () => word(50))
    const cut = segments(texts)
    expect(cut.length).toBeGreaterThan(1)
    expect(cut.flat()).toEqual(texts.map((_, i) => i))
    expect(segments(texts.slice(0, -1)).slice(0, -1)).toEqual(cut.slice(0, -1))
  })
  it('end between words, and never in a script from right to left', () => {
    expect(segments(['x'.repeat(4000), 'y', ' z'])).toEqual([[0, 1], [2]])
    expect(segments(['\u05d0 '.repeat(2000), ' a', ' b'])).toEqual([[0, 1, 2]])
  })
})
