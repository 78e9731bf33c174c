/** The next tokens as a table: cumulative probability, and what drawing does to them. */
import type { Schemas, TokenCandidate } from '../api/client'
import { labelInText, NUMBER_FIELDS, type NumberSetting } from './fields'
import { showWhitespace } from './words'

export interface NextTokenRow {
  chance: TokenCandidate
  /** Of this token and all likelier ones; null for one that was looked up. */
  cumulative: number | null
  /** The greedy continuation, if the request includes it. */
  ahead: string | null
}

export function nextTokenRows(
  reply: Schemas['NextReply'],
  ahead: ReadonlyMap<number, string>,
): NextTokenRow[] {
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
  return token.text === '' ? '∅' : showWhitespace(token.text)
}

// biome-ignore format: two lines
const FILTERS = [
  'temperature', 'top_k', 'top_p', 'min_p', 'typical_p',
  'top_n_sigma', 'xtc_probability', 'xtc_threshold',
] as const
const PENALTIES = ['repetition_penalty', 'presence_penalty', 'frequency_penalty', 'dry_multiplier'] as const
type Filter = (typeof FILTERS)[number]
type SamplingSettings = Record<Filter | (typeof PENALTIES)[number], number> & { temperature_first: boolean }

const isNeutral = (name: keyof SamplingSettings & NumberSetting, from: SamplingSettings) =>
  from[name] === NUMBER_FIELDS[name].neutral

/** The filters that change the distribution. XTC's threshold matters only with its probability. */
const active = (from: SamplingSettings): Filter[] =>
  FILTERS.filter((name) =>
    name === 'xtc_threshold' ? !isNeutral('xtc_probability', from) : !isNeutral(name, from),
  )

/** The fields of the request; none if sampling does not change the distribution. */
export function samplingFields(from: SamplingSettings): Partial<Schemas['NextTokens']> {
  const request: Partial<Schemas['NextTokens']> = {}
  for (const name of active(from)) request[name] = from[name]
  if (from.temperature_first && 'temperature' in request) request.temperature_first = true
  return request
}

/** The note below the table: what its probabilities include. */
export function probabilityNote(from: SamplingSettings): string {
  const parts = active(from).map((name) => `${labelInText(name)} ${from[name]}`)
  const own = 'p is the model’s probability'
  const penalties = PENALTIES.filter((name) => !isNeutral(name, from)).map(
    (name) => `the ${labelInText(name)} of ${from[name]}`,
  )
  const order = from.temperature_first && !isNeutral('temperature', from) ? ' (temperature first)' : ''
  const drawn = parts.length
    ? `${own}; “sampled” is the probability after ${parts.join(', ')}${order}.`
    : `${own}. With neutral settings tokens are sampled with it.`
  return penalties.length ? `${drawn} Neither includes ${penalties.join(', ')}.` : drawn
}
