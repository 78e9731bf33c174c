import { describe, expect, it } from 'vitest'
import { candidateRows, costOf, prunedIn, type Round, reasonText, scoreText } from '../src/model/run'

const round = (number: number, scores: Record<number, number | string | null>, kept: number[]): Round => ({
  round: number,
  candidates: Object.entries(scores).map(([node, score]) => ({ node: Number(node), score, by: null })),
  kept,
  cost: { tokens: 100 * number, seconds: number, candidates: 3, valued: 3, prompt_tokens: 0, stopped: null },
})
const rounds = [round(1, { 1: 0.9, 2: 0.1, 3: 0.5 }, [3, 1]), round(2, { 4: 0.2, 5: 0.7 }, [5])]

describe('a search', () => {
  it('left what no round kept, up to the one that is looked at', () => {
    expect([...prunedIn(rounds, 1)]).toEqual([2])
    expect([...prunedIn(rounds, null)]).toEqual([2, 4])
    expect([...prunedIn([], null)]).toEqual([])
  })

  it('lists kept candidates first, in their order', () => {
    expect(candidateRows(rounds[0]!).map((each) => [each.node, each.isKept])).toEqual([
      [3, true],
      [1, true],
      [2, false],
    ])
  })

  it('may keep a node of an earlier round, or one several times', () => {
    const rows = candidateRows(round(3, { 6: -0.5 }, [5, 6, 6]))
    expect(rows.map((each) => [each.node, each.times])).toEqual([
      [5, 1],
      [6, 2],
    ])
    expect(rows[1]!.bar).toBeCloseTo(Math.exp(-0.5))
  })

  it('reports the cost so far, and the total at the end', () => {
    expect(costOf(rounds, null)).toMatchObject({ tokens: 200, seconds: 2, stopped: null })
    const cost = { ...rounds[1]!.cost, tokens: 250, stopped: 'tokens' as const }
    expect(costOf(rounds, { cost })).toBe(cost)
    expect(costOf([], null).tokens).toBe(0)
  })

  it('has scores that JSON does not', () => {
    expect(candidateRows(round(1, { 1: '-inf', 2: null }, [])).map((each) => scoreText(each.score))).toEqual([
      '−∞',
      '–',
    ])
    expect(scoreText(-0.0853)).toBe('−0.09')
    expect(reasonText('the answer -4 has a score of -0.46')).toBe('the answer -4 has a score of −0.46')
  })
})
