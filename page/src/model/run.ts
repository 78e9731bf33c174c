/** The rounds of a search: the candidates of each, the kept ones, and their scores. */
import type { Schemas } from '../api/client'
import { parseNumber } from './heat'

export type Round = Schemas['RoundObject']

export type RunResult = Schemas['RunResult']
type AnswerGroup = Schemas['AnswerGroupObject']
export type Cost = Schemas['SearchCost']

/** A summary of a group of answers: the number of texts, the score and the check. */
export function groupFacts(group: AnswerGroup, measure: string): string {
  const score = parseNumber(group.score)
  const ranked = measure === 'share of votes' || score === null ? group.mean_logprob : score
  const name = measure === 'share of votes' || score === null ? 'mean log-probability' : measure
  return [
    `${group.count} ${group.count === 1 ? 'text' : 'texts'}`,
    `${Math.round(group.share * 100)} %`,
    ranked === null ? '' : `${name} ${scoreText(ranked)}`,
    group.solved === null ? '' : group.solved ? 'passes the check' : 'fails the check',
  ]
    .filter(Boolean)
    .join(' · ')
}

/** A reason of the server, with the minus sign of `scoreText` in its scores. */
export const reasonText = (reason: string): string => reason.replace(/(?<![\w.])-(?=\d+\.\d\d\b)/g, '−')

/** Candidates that no round up to `upTo` has kept; null: all rounds. */
export function prunedIn(rounds: readonly Round[], upTo: number | null): ReadonlySet<number> {
  const shownRounds = rounds.filter((each) => upTo === null || each.round <= upTo)
  const kept = new Set(shownRounds.flatMap((each) => each.kept))
  const candidates = shownRounds.flatMap((each) => each.candidates.map((one) => one.node))
  return new Set(candidates.filter((each) => !kept.has(each)))
}

export interface CandidateRow {
  node: number
  score: number | null
  by: string | null
  isKept: boolean
  /** How often it was kept: particles may share a node. */
  times: number
  /** 0 to 1: how long its bar is. */
  bar: number
}

/** A round's candidates: those kept first, in their order, then the others by score. */
export function candidateRows(round: Round): CandidateRow[] {
  const times = new Map<number, number>()
  for (const node of round.kept) times.set(node, (times.get(node) ?? 0) + 1)
  const place = new Map(round.kept.map((each, at) => [each, at]))
  const known = new Map(round.candidates.map((each) => [each.node, each]))
  const rows = round.candidates.map((each) => {
    const score = parseNumber(each.score)
    const n = times.get(each.node) ?? 0
    return { node: each.node, score, by: each.by ?? null, isKept: n > 0, times: n, bar: barOf(score) }
  })
  // Of an earlier round, and still among the best.
  for (const node of new Set(round.kept)) {
    if (!known.has(node))
      rows.push({ node, score: null, by: null, isKept: true, times: times.get(node)!, bar: 0 })
  }
  return rows.sort(
    (a, b) =>
      (place.get(a.node) ?? Infinity) - (place.get(b.node) ?? Infinity) ||
      (b.score ?? -Infinity) - (a.score ?? -Infinity),
  )
}

/** Scores are from 0 to 1, or log-probabilities, which are below 0. */
function barOf(score: number | null): number {
  if (score === null) return 0
  const p = score < 0 ? Math.exp(score) : score
  return Math.max(0, Math.min(1, p))
}

const NO_COST: Cost = {
  tokens: 0,
  seconds: 0,
  candidates: 0,
  valued: 0,
  prompt_tokens: 0,
  stopped: null,
}

/** The cost of a search, from its events so far. */
export const costOf = (rounds: readonly Round[], result: Pick<RunResult, 'cost'> | null): Cost =>
  result?.cost ?? rounds.at(-1)?.cost ?? NO_COST

/** A score as one reads it. */
export function scoreText(score: number | null): string {
  if (score === null) return '–'
  if (!Number.isFinite(score)) return score > 0 ? '∞' : '−∞'
  const text = Math.abs(score) >= 100 ? score.toFixed(0) : score.toFixed(2)
  return /^-0\.?0*$/.test(text) ? text.slice(1) : text.replace(/^-/, '−')
}
