/** Sampling parameters: their labels, neutral values and the values that the server accepts. */

export type NumberSetting =
  | 'n'
  | 'max_tokens'
  | 'temperature'
  | 'top_p'
  | 'top_k'
  | 'min_p'
  | 'repetition_penalty'
  | 'typical_p'
  | 'presence_penalty'
  | 'frequency_penalty'
  | 'penalty_last_n'
  | 'top_n_sigma'
  | 'xtc_probability'
  | 'xtc_threshold'
  | 'dry_multiplier'
  | 'dry_base'
  | 'dry_allowed_length'
  | 'dry_penalty_last_n'
  | 'min_tokens'
  | 'seed'

/** Parameters whose field may be empty. */
export type OptionalNumber = 'penalty_last_n' | 'dry_penalty_last_n' | 'seed'

export interface Limits {
  n: number
  tokens: number
}

export interface NumberField {
  label: string
  /** The tooltip: its effect in one sentence. */
  hint: string
  /** The value that does not change the distribution; null: none, or an empty field. */
  neutral: number | null
  /** A sampler's place in the form: always visible, or folded under "More samplers". */
  sampler?: 'main' | 'more'
  /** An empty field is allowed, and this is its placeholder. */
  empty?: string
  isInteger: boolean
  /** Allowed values; low is excluded where isOpen. */
  low: number
  high?: number
  isOpen?: boolean
  limit?: keyof Limits
  step: number
}

/** Above that a number of JSON is not exact in a browser. */
export const MAX_SEED = Number.MAX_SAFE_INTEGER
const MAX_PENALTY = 100

/** When a seed does not repeat a text, as the end of a sentence. */
export const SEED_EXCEPTIONS = 'rounding in bfloat16, MLX and llama.cpp may change a token'

// biome-ignore format: a table is read by lines
export const NUMBER_FIELDS: Record<NumberSetting, NumberField> = {
  n: { label: 'Branches', hint: 'The number of branches that grow at once.', neutral: null, isInteger: true, low: 1, limit: 'n', step: 1 },
  max_tokens: { label: 'Max tokens', hint: 'Each branch ends after this many tokens.', neutral: null, isInteger: true, low: 1, limit: 'tokens', step: 8 },
  temperature: { label: 'Temperature', hint: 'Lower values prefer likely tokens, higher values allow rarer ones; 0 always takes the likeliest.', neutral: 1, isInteger: false, low: 0, step: 0.1, sampler: 'main' },
  top_p: { label: 'Top-p', hint: 'Keeps the likeliest tokens that together reach this probability; 1: off.', neutral: 1, isInteger: false, low: 0, high: 1, isOpen: true, step: 0.05, sampler: 'main' },
  top_k: { label: 'Top-k', hint: 'Keeps the k likeliest tokens; 0: all.', neutral: 0, isInteger: true, low: 0, high: 2 ** 31 - 1, step: 1, sampler: 'main' },
  min_p: { label: 'Min-p', hint: 'Keeps tokens with at least this fraction of the likeliest token’s probability; 0: off.', neutral: 0, isInteger: false, low: 0, high: 1, step: 0.01, sampler: 'main' },
  repetition_penalty: { label: 'Repetition penalty', hint: 'Above 1, tokens that already occurred, also in the prompt, become less likely; 1: off.', neutral: 1, isInteger: false, low: 0, isOpen: true, step: 0.05, sampler: 'main' },
  min_tokens: { label: 'Min tokens', hint: 'No branch ends before this many tokens; 0: no minimum.', neutral: 0, isInteger: true, low: 0, limit: 'tokens', step: 8, sampler: 'more' },
  typical_p: { label: 'Typical-p', hint: 'Keeps tokens whose surprise is close to the average, up to this much probability; 1: off.', neutral: 1, isInteger: false, low: 0, high: 1, isOpen: true, step: 0.05, sampler: 'more' },
  presence_penalty: { label: 'Presence penalty', hint: 'Above 0, tokens that were generated before become less likely, however often they occurred.', neutral: 0, isInteger: false, low: -MAX_PENALTY, high: MAX_PENALTY, step: 0.1, sampler: 'more' },
  frequency_penalty: { label: 'Frequency penalty', hint: 'Above 0, a token becomes less likely each time it is generated.', neutral: 0, isInteger: false, low: -MAX_PENALTY, high: MAX_PENALTY, step: 0.1, sampler: 'more' },
  penalty_last_n: { label: 'Penalty window', hint: 'The number of last tokens that the penalties count; empty: all.', neutral: null, isInteger: true, low: 1, high: 2 ** 31 - 1, step: 64, sampler: 'more', empty: 'all' },
  top_n_sigma: { label: 'Top-nσ', hint: 'Keeps tokens whose logit is within this many standard deviations of the highest; 0: off.', neutral: 0, isInteger: false, low: 0, step: 0.1, sampler: 'more' },
  xtc_probability: { label: 'XTC probability', hint: 'How often the likeliest choices are dropped, for less common words; 0: never.', neutral: 0, isInteger: false, low: 0, high: 1, step: 0.1, sampler: 'more' },
  xtc_threshold: { label: 'XTC threshold', hint: 'XTC drops all tokens with at least this probability, except the least likely of them.', neutral: 0.1, isInteger: false, low: 0, high: 1, step: 0.05, sampler: 'more' },
  dry_multiplier: { label: 'DRY multiplier', hint: 'Above 0, tokens that continue a repeated sequence become less likely; 0: off.', neutral: 0, isInteger: false, low: 0, step: 0.1, sampler: 'more' },
  dry_base: { label: 'DRY base', hint: 'The growth of the DRY penalty for each further repeated token.', neutral: 1.75, isInteger: false, low: 1, step: 0.05, sampler: 'more' },
  dry_allowed_length: { label: 'DRY allowed length', hint: 'DRY ignores repetitions of fewer tokens.', neutral: 2, isInteger: true, low: 1, step: 1, sampler: 'more' },
  dry_penalty_last_n: { label: 'DRY window', hint: 'The number of last tokens in which DRY looks for repetitions; empty: all.', neutral: null, isInteger: true, low: 1, high: 2 ** 31 - 1, step: 64, sampler: 'more', empty: 'all' },
  seed: { label: 'Seed', hint: `The same seed gives the same branches, but ${SEED_EXCEPTIONS}. Empty: a random one each time.`, neutral: null, isInteger: true, low: 0, high: MAX_SEED, step: 1, empty: 'random' },
}

export const SAMPLERS = (Object.keys(NUMBER_FIELDS) as NumberSetting[]).filter(
  (name) => NUMBER_FIELDS[name].sampler,
)

/** The server's default texts that end a repetition for DRY. */
export const DRY_BREAKERS: readonly string[] = ['\n', ':', '"', '*']

/** The settings that are not numbers. */
export type OtherSetting = 'temperature_first' | 'logit_bias' | 'constraint' | TextsSetting | TokenIdsSetting
export type TextsSetting = 'stop' | 'dry_sequence_breakers' | 'bad_words'
export type TokenIdsSetting = 'stop_token_ids' | 'allowed_token_ids'
export const TOKEN_IDS: readonly TokenIdsSetting[] = ['stop_token_ids', 'allowed_token_ids']

// biome-ignore format: a table is read by lines
export const OTHER_FIELDS: Record<OtherSetting, Pick<NumberField, 'label' | 'hint'>> = {
  temperature_first: { label: 'Temperature first', hint: 'Applies the temperature before the filters, not after them.' },
  dry_sequence_breakers: { label: 'DRY breakers', hint: 'DRY sees no repetition across these texts; \\n is a new line.' },
  logit_bias: { label: 'Token biases', hint: 'Added to the token’s logit: above 0 it is more likely. “ban” excludes it, “only” excludes all others. Most tokens of words begin with a space.' },
  stop: { label: 'Stop at', hint: 'A branch ends with any of these texts; \\n is a new line.' },
  bad_words: { label: 'Bad words', hint: 'No branch contains any of these texts, as the tokenizer splits them.' },
  stop_token_ids: { label: 'Stop token ids', hint: 'A branch also ends with any of these tokens.' },
  allowed_token_ids: { label: 'Allowed token ids', hint: 'Only these tokens are generated; none: all. Include an end token if a branch may end by itself.' },
  constraint: { label: 'Output format', hint: 'Restricts the text of every branch to this format.' },
}

/** The label of any setting; unknown names as they are. */
export function settingLabel(name: string): string {
  const fields: Record<string, { label: string }> = { ...NUMBER_FIELDS, ...OTHER_FIELDS }
  return fields[name]?.label ?? name
}

/** The label within a sentence: "top-p", but "XTC probability". */
export function labelInText(name: string): string {
  const label = settingLabel(name)
  return /^[A-Z]{2}/.test(label) ? label : label.charAt(0).toLowerCase() + label.slice(1)
}

/** Read typed text. Returns the number, or the error. */
export function readNumber(
  name: NumberSetting,
  text: string,
  limits: Limits | null,
): { value: number } | string {
  const field = NUMBER_FIELDS[name]
  const plain = text.trim().replace(',', '.')
  const value = Number(plain)
  if (plain === '' || !Number.isFinite(value)) return `Enter a number, ${range(name, limits)}.`
  if (field.isInteger && !Number.isInteger(value)) return `Enter a whole number, ${range(name, limits)}.`
  const high = highest(name, limits)
  const isLow = field.isOpen ? value <= field.low : value < field.low
  if (isLow || (high !== undefined && value > high)) return `It must be ${range(name, limits)}.`
  return { value }
}

function highest(name: NumberSetting, limits: Limits | null): number | undefined {
  const field = NUMBER_FIELDS[name]
  return field.limit && limits ? limits[field.limit] : field.high
}

function range(name: NumberSetting, limits: Limits | null): string {
  const field = NUMBER_FIELDS[name]
  const high = highest(name, limits)
  const low = field.isOpen ? `above ${field.low}` : `${field.low} or more`
  if (high === undefined || high >= 2 ** 31 - 1) return low
  return field.isOpen ? `above ${field.low}, at most ${high}` : `${field.low} to ${high}`
}

// Constraints

export const KINDS = {
  json_schema: 'JSON schema',
  regex: 'Regular expression',
  choices: 'Choices',
  gbnf: 'Grammar (GBNF)',
  lark: 'Grammar (Lark)',
} as const
export type ConstraintKind = keyof typeof KINDS
export interface Constraint {
  kind: ConstraintKind
  text: string
}

const MISSING = {
  json_schema: 'a JSON schema',
  regex: 'a regular expression',
  gbnf: 'a grammar',
  lark: 'a grammar',
} as const

/** A constraint as a request says it, or what is wrong with it. Choices stand one a line. */
export function readConstraint(given: Constraint): Record<string, unknown> | string {
  if (given.kind === 'choices') {
    const choices = given.text.split('\n').filter((each) => each !== '')
    return choices.length ? { choices } : 'Enter one choice per line.'
  }
  if (!given.text.trim()) return `Enter ${MISSING[given.kind]}.`
  if (given.kind !== 'json_schema') return { [given.kind]: given.text }
  try {
    const schema: unknown = JSON.parse(given.text)
    const isSchema =
      typeof schema === 'boolean' || (typeof schema === 'object' && schema !== null && !Array.isArray(schema))
    return isSchema ? { json_schema: schema } : 'A JSON schema must be an object.'
  } catch (error) {
    return `Invalid JSON: ${error instanceof Error ? error.message : String(error)}`
  }
}

// Token biases

/** A token that is more or less likely: 'ban' never, 'only' with no token but others of this kind. */
export interface Bias {
  id: number
  text: string
  bias: number | 'ban' | 'only'
}

/** The value of a bias, or what is wrong with it. */
export function readBias(text: string): Bias['bias'] | null {
  const plain = text.trim().toLowerCase().replace(',', '.').replace('−', '-')
  if (plain === 'ban' || plain === '-inf') return 'ban'
  if (plain === 'only' || plain === 'inf') return 'only'
  const value = Number(plain)
  return plain === '' || !Number.isFinite(value) ? null : value
}

/** Biases as a request says them. */
export const logitBias = (biases: readonly Bias[]): Record<string, number | 'inf' | '-inf'> =>
  Object.fromEntries(
    biases.map(({ id, bias }) => [String(id), bias === 'ban' ? '-inf' : bias === 'only' ? 'inf' : bias]),
  )

// Lists

/** Read what is typed into a field that adds to a list. Returns the new values, or the error. */
export function readListed(
  name: TextsSetting | TokenIdsSetting,
  typed: string,
  nVocab: number,
): (string | number)[] | string {
  if (name === 'stop_token_ids' || name === 'allowed_token_ids') {
    const ids = typed.split(/[\s,]+/).filter((each) => each !== '')
    if (ids.every((each) => /^\d+$/.test(each) && Number(each) < nVocab)) return ids.map(Number)
    return `Enter whole numbers, 0 to ${nVocab - 1}.`
  }
  const text = readStop(typed)
  if (name === 'bad_words' && text !== '' && !text.trim()) return 'Enter a text that is not only white space.'
  return text === '' ? [] : [text]
}

// Stop texts, as one types them: \n and \t are those characters.

export const writeStop = (stop: string): string =>
  stop.replace(/\\/g, '\\\\').replace(/\n/g, '\\n').replace(/\t/g, '\\t')

export const readStop = (text: string): string =>
  text.replace(/\\([\\nt])/g, (_, char: string) => (char === 'n' ? '\n' : char === 't' ? '\t' : '\\'))
