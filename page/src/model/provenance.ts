/** The requests that reproduce a node, by growing or by writing it. */
import type { GrowRequest, Model, Node } from '../api/client'
import { DRY_BREAKERS, NUMBER_FIELDS, SAMPLERS, settingLabel } from './fields'

type Json = Record<string, unknown>

/** Values that do not change the model's distribution. */
const NEUTRAL: Json = {
  ...Object.fromEntries(SAMPLERS.map((name) => [name, NUMBER_FIELDS[name].neutral])),
  dry_sequence_breakers: DRY_BREAKERS,
  logit_bias: {},
  stop: [],
  temperature_first: false,
}
const CONSTRAINTS: Record<string, string> = {
  json_schema: 'json_schema',
  regex: 'regex',
  choice: 'choices',
  gbnf: 'gbnf',
  lark: 'lark',
}

/** Limits on tokens, as a node records them: their names in a request. */
const LIMITS: Record<string, string> = {
  min_tokens: 'min_tokens',
  bad_words: 'bad_words',
  stop_ids: 'stop_token_ids',
  allowed: 'allowed_token_ids',
}

/** The sampling parameters that the server uses if a request has none. */
export const defaultsFor = (model: Model | null, isChat: boolean | null | undefined): Json =>
  (isChat ? model?.chat_defaults : model?.defaults) ?? {}

const isJson = (value: unknown): value is Json => typeof value === 'object' && value !== null
const isSame = (a: unknown, b: unknown) => JSON.stringify(a) === JSON.stringify(b)

/** A recorded constraint as limits on tokens, by the names of a request, and a format of the text. */
function recordedConstraint(constraint: unknown): { limits: Json; format: Json | null } {
  if (!isJson(constraint)) return { limits: {}, format: null }
  const { token_limits, inner } = constraint
  if (!isJson(token_limits)) return { limits: {}, format: constraint }
  const named = Object.entries(LIMITS).map(([name, field]) => [field, token_limits[name]] as const)
  const limits = Object.fromEntries(named.filter(([, value]) => value && !isSame(value, [])))
  return { limits, format: isJson(inner) ? inner : null }
}

/** The sampling parameters of a node that are not neutral: names and values. */
export function changedParams(params: Json): [string, string][] {
  const rows: [string, string][] = []
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = params[name]
    if (value === undefined || isSame(value, neutral)) continue
    const text = name === 'logit_bias' ? `${Object.keys(Object(value)).length} tokens` : written(value)
    rows.push([settingLabel(name), text])
  }
  const { limits, format } = recordedConstraint(params['constraint'])
  for (const [name, value] of Object.entries(limits)) rows.push([settingLabel(name), written(value)])
  if (format) rows.push([settingLabel('constraint'), Object.keys(format)[0] ?? ''])
  return rows
}

const written = (value: unknown): string =>
  Array.isArray(value) ? value.map((each) => JSON.stringify(each)).join(' ') : String(value)

/**
 * The request that grows a node again, or why there is none.
 * defaults: of defaultsFor; values equal to them are left out.
 */
export function repeatRequest(node: Node, defaults: Json): GrowRequest | string {
  const params = node.params
  if (!params) return 'This text was written, not generated.'
  if (node.branch === null || node.branch === undefined) return 'The node’s branch number was not recorded.'
  const { seed, max_tokens, constraint } = params
  if (!Number.isSafeInteger(seed)) return 'The node’s seed is too large for a browser to represent exactly.'
  const other = node.model ? { model: node.model } : {}
  const request: GrowRequest = { ...other, n: 1, first_branch: node.branch }
  const recorded: Json = { seed }
  // A stopped branch is reproduced up to its last token.
  const isCut = node.finish_reason === null || ['cancelled', 'interrupted'].includes(node.finish_reason)
  recorded['max_tokens'] = isCut ? Math.max(node.n_tokens, 1) : max_tokens
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = params[name]
    if (value === undefined || value === null) continue
    if (!isSame(value, name in defaults ? defaults[name] : neutral)) recorded[name] = value
  }
  const { limits, format } = recordedConstraint(constraint)
  if (Object.values(Object(limits['bad_words'])).some(isJson))
    return 'The node’s bad words are token ids, which are not available over HTTP.'
  Object.assign(recorded, limits)
  if (format) {
    const kind = Object.keys(format)[0] ?? ''
    const field = CONSTRAINTS[kind]
    if (!field) return `The node’s constraint (${kind}) is not available over HTTP.`
    if (limits['min_tokens']) return 'A minimum of tokens with an output format is not available over HTTP.'
    recorded[field] = format[kind]
  }
  return Object.assign(request, recorded)
}

/** The body that writes the same text: a message without its template, parts of characters as tokens. */
function textRequest(node: Node): Json {
  if (node.said != null) return { message: node.said }
  return node.text.includes('\ufffd') && node.token_ids ? { token_ids: node.token_ids } : { text: node.text }
}

export interface ReproductionCall {
  /** Below /api/v1. */
  path: string
  body: Json
  /** The method of weft.Client, its arguments but the options, and what it answers. */
  call: string
  given: unknown[]
  shows: string
}

/** The one request that reproduces a node. request: the result of repeatRequest. */
export function reproductionCall(
  node: Node,
  loom: string,
  request: GrowRequest | string,
  root: { prompt: string; template: boolean },
): ReproductionCall {
  const at = `/looms/${encodeURIComponent(loom)}`
  if (node.parent === null)
    return { path: '/looms', body: { ...root }, call: 'create_loom', given: [], shows: 'name' }
  if (typeof request === 'string')
    return {
      path: `${at}/nodes`,
      body: { parent: node.parent, ...textRequest(node) },
      call: 'add',
      given: [loom],
      shows: 'added[0].node',
    }
  return {
    path: `${at}/nodes/${node.parent}/generate`,
    body: { ...request, wait: true },
    call: 'begin',
    given: [loom, node.parent],
    shows: 'nodes[0].text',
  }
}

/** A command for a shell. origin: where the server is. */
export function curl(request: ReproductionCall, origin: string, hasKey: boolean): string {
  const body = JSON.stringify(request.body).replace(/'/g, "'\\''")
  const key = hasKey ? [`-H "Authorization: Bearer $WEFT_API_KEY"`] : []
  return [
    `curl -s '${origin}/api/v1${request.path.replace(/'/g, '%27')}'`,
    `-H 'Content-Type: application/json'`,
    ...key,
    `-d '${body}'`,
  ].join(' \\\n  ')
}

/** A program. The key is read from the environment. */
export function python(request: ReproductionCall, origin: string, hasKey: boolean): string {
  const given = [...request.given.map(pythonLiteral), ...Object.entries(request.body).map(pythonArgument)]
  const one = `client.${request.call}(${given.join(', ')})`
  const call =
    one.length <= 80
      ? one
      : `client.${request.call}(\n${given.map((each) => `        ${each},\n`).join('')}    )`
  return [
    'import weft',
    '',
    ...(hasKey ? ['# The key is read from WEFT_API_KEY, or given as api_key="…".'] : []),
    `with weft.Client(${pythonLiteral(origin)}) as client:`,
    `    result = ${call}`,
    `    print(result.${request.shows})`,
    '',
  ].join('\n')
}

const pythonArgument = ([name, value]: [string, unknown]): string => `${name}=${pythonLiteral(value)}`

/** A value of JSON as Python writes it. */
export function pythonLiteral(value: unknown): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(', ')}]`
  if (typeof value === 'object')
    return `{${Object.entries(value)
      .map(([name, each]) => `${JSON.stringify(name)}: ${pythonLiteral(each)}`)
      .join(', ')}}`
  return JSON.stringify(value)
}

/** Compare the tokens of a node with those of its reproduction. */
export function comparison(before: readonly number[], after: readonly number[]): 'same' | 'longer' | 'other' {
  const n = Math.min(before.length, after.length)
  for (let i = 0; i < n; i++) if (before[i] !== after[i]) return 'other'
  return before.length === after.length ? 'same' : after.length > before.length ? 'longer' : 'other'
}
