/** The figures of sampling: how each is called, what is neutral, and what the server takes. */

export type Figure =
  | 'n'
  | 'max_tokens'
  | 'temperature'
  | 'top_p'
  | 'top_k'
  | 'min_p'
  | 'repetition_penalty'
  | 'seed'

export interface Limits {
  n: number
  tokens: number
}

export interface FigureField {
  label: string
  /** What it does, in a sentence: the tooltip. */
  says: string
  /** What leaves the model's own distribution as it is; null: there is no such value. */
  neutral: number | null
  isWhole: boolean
  /** Allowed values; low is excluded where isOpen. */
  low: number
  high?: number
  isOpen?: boolean
  limit?: keyof Limits
  step: number
}

/** Above that a number of JSON is not exact in a browser. */
export const MOST_SEED = Number.MAX_SAFE_INTEGER

// biome-ignore format: a table is read by lines
export const FIGURES: Record<Figure, FigureField> = {
  n: { label: 'Branches', says: 'How many branches grow at once.', neutral: null, isWhole: true, low: 1, limit: 'n', step: 1 },
  max_tokens: { label: 'Max tokens', says: 'A branch ends after so many tokens.', neutral: null, isWhole: true, low: 1, limit: 'tokens', step: 8 },
  temperature: { label: 'Temperature', says: 'Below 1 likely tokens become likelier, above 1 rarer ones do; 0 always takes the likeliest.', neutral: 1, isWhole: false, low: 0, step: 0.1 },
  top_p: { label: 'Top-p', says: 'Only the likeliest tokens that make up this much probability.', neutral: 1, isWhole: false, low: 0, high: 1, isOpen: true, step: 0.05 },
  top_k: { label: 'Top-k', says: 'Only the k likeliest tokens; 0: all.', neutral: 0, isWhole: true, low: 0, high: 2 ** 31 - 1, step: 1 },
  min_p: { label: 'Min-p', says: 'Only tokens at least this likely, measured by the likeliest one.', neutral: 0, isWhole: false, low: 0, high: 1, step: 0.01 },
  repetition_penalty: { label: 'Repetition penalty', says: 'Above 1, tokens that were there, those of the prompt too, become less likely.', neutral: 1, isWhole: false, low: 0, isOpen: true, step: 0.05 },
  seed: { label: 'Seed', says: 'The same seed gives the same branches; empty: a new one each time.', neutral: null, isWhole: true, low: 0, high: MOST_SEED, step: 1 },
}

/** Read what somebody typed: the number, or what is wrong with it. */
export function readFigure(name: Figure, text: string, limits: Limits | null): { value: number } | string {
  const field = FIGURES[name]
  const plain = text.trim().replace(',', '.')
  const value = Number(plain)
  if (plain === '' || !Number.isFinite(value)) return `A number, ${range(name, limits)}.`
  if (field.isWhole && !Number.isInteger(value)) return `A whole number, ${range(name, limits)}.`
  const high = highest(name, limits)
  const isLow = field.isOpen ? value <= field.low : value < field.low
  if (isLow || (high !== undefined && value > high)) return `It must be ${range(name, limits)}.`
  return { value }
}

function highest(name: Figure, limits: Limits | null): number | undefined {
  const field = FIGURES[name]
  return field.limit && limits ? limits[field.limit] : field.high
}

function range(name: Figure, limits: Limits | null): string {
  const field = FIGURES[name]
  const high = highest(name, limits)
  const low = field.isOpen ? `above ${field.low}` : `${field.low} or more`
  if (high === undefined || high >= 2 ** 31 - 1) return low
  return field.isOpen ? `above ${field.low} and ${high} at most` : `${field.low} to ${high}`
}

// Constraints

export const KINDS = { json_schema: 'JSON schema', regex: 'Regular expression', choices: 'Choices' } as const
export type ConstraintKind = keyof typeof KINDS
export interface Constraint {
  kind: ConstraintKind
  text: string
}

/** A constraint as a request says it, or what is wrong with it. Choices stand one a line. */
export function readConstraint(given: Constraint): Record<string, unknown> | string {
  if (given.kind === 'choices') {
    const choices = given.text.split('\n').filter((each) => each !== '')
    return choices.length ? { choices } : 'One choice a line.'
  }
  if (!given.text.trim()) return given.kind === 'regex' ? 'A regular expression.' : 'A JSON schema.'
  if (given.kind === 'regex') return { regex: given.text }
  try {
    const schema: unknown = JSON.parse(given.text)
    const isSchema =
      typeof schema === 'boolean' || (typeof schema === 'object' && schema !== null && !Array.isArray(schema))
    return isSchema ? { json_schema: schema } : 'A JSON schema is an object.'
  } catch (error) {
    return `No JSON: ${error instanceof Error ? error.message : String(error)}`
  }
}

// Stop texts, as one types them: \n and \t are those characters.

export const writeStop = (stop: string): string =>
  stop.replace(/\\/g, '\\\\').replace(/\n/g, '\\n').replace(/\t/g, '\\t')

export const readStop = (text: string): string =>
  text.replace(/\\([\\nt])/g, (_, letter: string) => (letter === 'n' ? '\n' : letter === 't' ? '\t' : '\\'))
