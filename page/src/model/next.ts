/** The next tokens as a table: cumulative probability, and what drawing does to them. */
import type { Schemas, TokenCandidate } from '../api/client'
import { visible } from './words'

export interface ChanceRow {
  chance: TokenCandidate
  /** Of this token and all likelier ones; null for one that was looked up. */
  cumulative: number | null
  /** The greedy continuation, if the request includes it. */
  ahead: string | null
}

export function chanceRows(reply: Schemas['NextReply'], ahead: ReadonlyMap<number, string>): ChanceRow[] {
  let sum = 0
  return reply.next.map((chance) => {
    sum += chance.p
    return { chance, cumulative: Math.min(sum, 1), ahead: ahead.get(chance.id) ?? null }
  })
}

/** A token with visible white space; parts of characters are shown as bytes. */
export function tokenLabel(token: { text: string; bytes: number[] }): string {
  if (token.text.includes('\ufffd') && token.bytes.length)
    return token.bytes.map((each) => each.toString(16).toUpperCase().padStart(2, '0')).join(' ')
  return token.text === '' ? '∅' : visible(token.text)
}

interface Drawing {
  temperature: number
  top_p: number
  top_k: number
  min_p: number
  typical_p: number
  repetition_penalty: number
}

/** The fields of the request; none if sampling does not change the distribution. */
export function drawingRequest(from: Drawing): Partial<Schemas['NextTokens']> {
  const request: Partial<Schemas['NextTokens']> = {}
  if (from.temperature !== 1) request.temperature = from.temperature
  if (from.top_p !== 1) request.top_p = from.top_p
  if (from.top_k !== 0) request.top_k = from.top_k
  if (from.min_p !== 0) request.min_p = from.min_p
  if (from.typical_p !== 1) request.typical_p = from.typical_p
  return request
}

/** One sentence about the probabilities of the table. */
export function drawingText(from: Drawing): string {
  const parts: string[] = []
  if (from.temperature !== 1) parts.push(`temperature ${from.temperature}`)
  if (from.top_k !== 0) parts.push(`top-k ${from.top_k}`)
  if (from.top_p !== 1) parts.push(`top-p ${from.top_p}`)
  if (from.min_p !== 0) parts.push(`min-p ${from.min_p}`)
  if (from.typical_p !== 1) parts.push(`typical-p ${from.typical_p}`)
  const own = 'p is the model’s probability'
  const penalty =
    from.repetition_penalty === 1
      ? ''
      : ` Neither includes the repetition penalty of ${from.repetition_penalty}.`
  const drawn = parts.length
    ? `${own}; “sampled” is the probability after ${parts.join(', ')}.`
    : `${own}. With neutral settings tokens are sampled with it.`
  return drawn + penalty
}
