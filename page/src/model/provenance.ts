/** Where a node comes from, as requests that bring it again: growing, or writing. */
import type { GrowAsked, Model, Node } from '../api/client'
import { FIGURES, SAMPLERS } from './fields'

type Json = Record<string, unknown>

/** What leaves the model's own distribution as it is. */
const NEUTRAL: Json = {
  ...Object.fromEntries(SAMPLERS.map((name) => [name, FIGURES[name].neutral])),
  dry_sequence_breakers: ['\n', ':', '"', '*'],
  logit_bias: {},
  stop: [],
  temperature_first: false,
}
const LABELS: Record<string, string> = {
  ...Object.fromEntries(SAMPLERS.map((name) => [name, FIGURES[name].label])),
  dry_sequence_breakers: 'DRY breakers',
  logit_bias: 'Token biases',
  stop: 'Stop at',
  temperature_first: 'Temperature first',
}
const CONSTRAINTS: Record<string, string> = {
  json_schema: 'json_schema',
  regex: 'regex',
  choice: 'choices',
  gbnf: 'gbnf',
  lark: 'lark',
}

/** What the server takes where a request to grow gives no sampling. */
export const defaultsFor = (model: Model | null, isChat: boolean | null | undefined): Json =>
  (isChat ? model?.chat_defaults : model?.defaults) ?? {}

const isSame = (a: unknown, b: unknown) => JSON.stringify(a) === JSON.stringify(b)

/** What a node was drawn with that is not neutral: names and values. */
export function drawnWith(params: Json): [string, string][] {
  const rows: [string, string][] = []
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = params[name]
    if (value === undefined || isSame(value, neutral)) continue
    const text = name === 'logit_bias' ? `${Object.keys(value as Json).length} tokens` : written(value)
    rows.push([LABELS[name]!, text])
  }
  const constraint = params['constraint'] as Json | null | undefined
  if (constraint) rows.push(['Output format', Object.keys(constraint)[0] ?? ''])
  return rows
}

const written = (value: unknown): string =>
  Array.isArray(value) ? value.map((each) => JSON.stringify(each)).join(' ') : String(value)

/**
 * The request that grows a node again, or why there is none.
 * defaults: of defaultsFor; values equal to them are left out.
 */
export function againAsked(node: Node, defaults: Json): GrowAsked | string {
  const params = node.params
  if (!params) return 'This text was written, not generated.'
  if (node.branch === null || node.branch === undefined) return 'Its branch number was not recorded.'
  if (!Number.isSafeInteger(params['seed']))
    return 'Its seed is too large for a browser to represent exactly.'
  const other = node.model ? { model: node.model } : {}
  const asked: Json = { ...other, n: 1, seed: params['seed'], first_branch: node.branch }
  // What was stopped is grown as far as it came.
  const isCut = node.finish_reason === null || ['cancelled', 'interrupted'].includes(node.finish_reason)
  asked['max_tokens'] = isCut ? Math.max(node.n_tokens, 1) : params['max_tokens']
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = params[name]
    if (value === undefined || value === null) continue
    if (!isSame(value, name in defaults ? defaults[name] : neutral)) asked[name] = value
  }
  const constraint = params['constraint'] as Json | null | undefined
  if (constraint) {
    const kind = Object.keys(constraint)[0] ?? ''
    if (isMinimum(constraint))
      return { ...asked, min_tokens: constraint.token_limits.min_tokens } as GrowAsked
    const field = CONSTRAINTS[kind]
    if (!field) return `Its constraint (${kind}) is not available over HTTP.`
    asked[field] = constraint[kind]
  }
  return asked as GrowAsked
}

interface Minimum {
  token_limits: { min_tokens: number; allowed: null; bad_words: []; stop_ids: [] }
  inner: null
}
/** Whether a constraint only forbids end tokens at first, which a request asks for as `min_tokens`. */
function isMinimum(constraint: Json): constraint is Json & Minimum {
  const { allowed, bad_words, stop_ids } = (constraint['token_limits'] ?? {}) as Json
  const rest = [allowed, constraint['inner'], ...[bad_words, stop_ids].flat()]
  return 'token_limits' in constraint && rest.every((each) => each === null)
}

/** What somebody wrote, as they did: a message without the template, parts of characters as tokens. */
function said(node: Node): Json {
  if (node.said != null) return { message: node.said }
  return node.text.includes('\ufffd') && node.token_ids ? { token_ids: node.token_ids } : { text: node.text }
}

export interface Recipe {
  /** Below /api/v1. */
  path: string
  body: Json
  /** The method of weft.Client, its arguments but the options, and what it answers. */
  call: string
  given: unknown[]
  shows: string
}

/** How a node was brought: one request. asked: as againAsked tells it. */
export function recipe(
  node: Node,
  loom: string,
  asked: GrowAsked | string,
  root: { prompt: string; template: boolean },
): Recipe {
  const at = `/looms/${encodeURIComponent(loom)}`
  if (node.parent === null)
    return { path: '/looms', body: { ...root }, call: 'create_loom', given: [], shows: 'name' }
  if (typeof asked === 'string')
    return {
      path: `${at}/nodes`,
      body: { parent: node.parent, ...said(node) },
      call: 'add',
      given: [loom],
      shows: 'added[0].node',
    }
  return {
    path: `${at}/nodes/${node.parent}/generate`,
    body: { ...asked, wait: true },
    call: 'begin',
    given: [loom, node.parent],
    shows: 'nodes[0].text',
  }
}

/** A command for a shell. origin: where the server is. */
export function curl(made: Recipe, origin: string, hasKey: boolean): string {
  const body = JSON.stringify(made.body).replace(/'/g, "'\\''")
  const key = hasKey ? [`-H "Authorization: Bearer $WEFT_API_KEY"`] : []
  return [
    `curl -s '${origin}/api/v1${made.path.replace(/'/g, '%27')}'`,
    `-H 'Content-Type: application/json'`,
    ...key,
    `-d '${body}'`,
  ].join(' \\\n  ')
}

/** A program. The key is read from the environment. */
export function python(made: Recipe, origin: string, hasKey: boolean): string {
  const given = [...made.given.map(literal), ...Object.entries(made.body).map(named)]
  const one = `client.${made.call}(${given.join(', ')})`
  const call =
    one.length <= 80
      ? one
      : `client.${made.call}(\n${given.map((each) => `        ${each},\n`).join('')}    )`
  return [
    'import weft',
    '',
    ...(hasKey ? ['# The key is read from WEFT_API_KEY, or given as api_key="…".'] : []),
    `with weft.Client(${literal(origin)}) as client:`,
    `    made = ${call}`,
    `    print(made.${made.shows})`,
    '',
  ].join('\n')
}

const named = ([name, value]: [string, unknown]): string => `${name}=${literal(value)}`

/** A value of JSON as Python writes it. */
export function literal(value: unknown): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (Array.isArray(value)) return `[${value.map(literal).join(', ')}]`
  if (typeof value === 'object')
    return `{${Object.entries(value)
      .map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`)
      .join(', ')}}`
  return JSON.stringify(value)
}

/** What came when a node was grown again. */
export function comparison(before: readonly number[], after: readonly number[]): 'same' | 'longer' | 'other' {
  const n = Math.min(before.length, after.length)
  for (let i = 0; i < n; i++) if (before[i] !== after[i]) return 'other'
  return before.length === after.length ? 'same' : after.length > before.length ? 'longer' : 'other'
}
