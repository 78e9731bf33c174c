import { describe, expect, it } from 'vitest'
import { pieceAt, pieceOf, piecesOf } from '../src/model/pieces'

const encoder = new TextEncoder()
const of = (...texts: string[]) => texts.map((each) => ({ bytes: [...encoder.encode(each)] }))
const split = (text: string) => [...encoder.encode(text)].map((byte) => ({ bytes: [byte] }))

describe('tokens in a text', () => {
  it('stand one after another', () => {
    expect(piecesOf(of('Once', ' upon'), 'Once upon')).toEqual([
      { first: 0, count: 1, start: 0, end: 4 },
      { first: 1, count: 1, start: 4, end: 9 },
    ])
  })
  it('share a character when they are its bytes', () => {
    const pieces = piecesOf([...of('a'), ...split('🦊'), ...of('b')], 'a🦊b')!
    expect(pieces.map((each) => [each.first, each.count])).toEqual([
      [0, 1],
      [1, 4],
      [5, 1],
    ])
    expect(pieceOf(pieces, 3)).toBe(pieces[1])
    expect(pieceAt(pieces, 2)).toBe(pieces[1])
  })
  it('of a template have no place where they are not shown', () => {
    const tokens = of('<|bos|>', '<|user|>', 'Hi', '<|end|>')
    expect(piecesOf(tokens, 'Hi')).toEqual([{ first: 2, count: 1, start: 0, end: 2 }])
    expect(piecesOf(of('<|bos|>', 'bos'), 'bos')![0]!.first).toBe(1)
  })
  it('keep what is no text: a broken character is one replacement', () => {
    expect(piecesOf([...of('a'), { bytes: [0xe6, 0x97] }], 'a\ufffd')).toHaveLength(2)
    expect(piecesOf([{ bytes: [0xff] }, ...of('a')], '\ufffda')).toHaveLength(2)
  })
  it('are not known without their bytes, nor in another text', () => {
    expect(piecesOf([{ bytes: [] }], 'a')).toBeNull()
    expect(piecesOf(of('a'), 'b')).toBeNull()
  })
  it('begin after a blank that the tokenizer takes away', () => {
    expect(piecesOf(of(' Once', ' upon'), 'Once upon')![0]).toEqual({ first: 0, count: 1, start: 0, end: 4 })
  })

  it('are searched once for a text', () => {
    const tokens = of('Once', ' upon')
    expect(piecesOf(tokens, 'Once upon')).toBe(piecesOf(tokens, 'Once upon'))
    expect(piecesOf(tokens, 'upon')).toHaveLength(1)
    expect(piecesOf(tokens, 'Once upon')).toHaveLength(2)
  })
})
