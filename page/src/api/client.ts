/** The native API: one typed call for each route that the page uses, and its errors. */
import type { components } from './schema'

export type Schemas = components['schemas']
export type KvOp = Schemas['KvRequest']['op']
export type Node = Schemas['NodeObject']
export type Loom = Schemas['LoomObject']
export type Model = Schemas['ModelObject']
export type Job = Schemas['JobObject']
export type Changed = Schemas['Changed']
export type TokenCandidate = Schemas['TokenCandidate']
export type Token = Schemas['TokenObject']

/** What the server refused, or that it could not be reached (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly hint: string = '',
    readonly param: string | null = null,
    readonly details: Record<string, unknown> = {},
    readonly requestId: string = '',
    /** Seconds after which trying again makes sense; null where nobody said. */
    readonly retryAfterS: number | null = null,
  ) {
    super(message)
    this.name = 'ApiError'
  }

  /** The server, or the way to it, is not there: trying again later may help. */
  get isAway(): boolean {
    return this.status === 0 || this.status === 502 || this.status === 504
  }
}

type Query = Record<string, string | number | boolean | string[] | null | undefined>
interface Asked {
  query?: Query
  body?: unknown
  rev?: number
  signal?: AbortSignal
}

const BASE = '/api/v1'

let lost: () => void = () => {}
/** Call this whenever a request did not reach the server. */
export const whenLost = (call: () => void): void => {
  lost = call
}

export function address(path: string, query: Query = {}): string {
  const given = new URLSearchParams()
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined) continue
    for (const each of Array.isArray(value) ? value : [value]) given.append(name, String(each))
  }
  const text = given.toString()
  return `${BASE}${path}${text ? `?${text}` : ''}`
}

async function send(method: string, path: string, asked: Asked = {}): Promise<Response> {
  const headers: Record<string, string> = { 'X-Weft-Actor': 'page' }
  if (asked.rev !== undefined) headers['If-Match'] = String(asked.rev)
  const isRaw = asked.body instanceof Blob
  if (asked.body !== undefined && !isRaw) headers['Content-Type'] = 'application/json'
  let answer: Response
  try {
    answer = await fetch(address(path, asked.query), {
      method,
      headers,
      body: asked.body === undefined ? null : isRaw ? (asked.body as Blob) : JSON.stringify(asked.body),
      signal: asked.signal ?? null,
    })
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error
    lost()
    throw new ApiError(0, 'unreachable', 'The server does not answer.', 'Is weft serve still running?')
  }
  if (!answer.ok) throw await refused(answer)
  return answer
}

async function refused(answer: Response): Promise<ApiError> {
  const told = (await answer.json().catch(() => null)) as Schemas['ErrorReply'] | null
  const error = told?.error
  if (!error) return new ApiError(answer.status, 'error', `The server answered ${answer.status}.`)
  const retryAfter = Number(answer.headers.get('Retry-After') ?? NaN)
  return new ApiError(
    answer.status,
    error.code,
    error.message,
    error.hint ?? '',
    error.param ?? null,
    error.details ?? {},
    error.request_id ?? '',
    Number.isFinite(retryAfter) ? retryAfter : null,
  )
}

async function call<Reply>(method: string, path: string, asked?: Asked): Promise<Reply> {
  return (await (await send(method, path, asked)).json()) as Reply
}

const get = <Reply>(path: string, query?: Query, signal?: AbortSignal) =>
  call<Reply>('GET', path, { query: query ?? {}, ...(signal ? { signal } : {}) })
const post = <Reply>(path: string, body: unknown = {}, rev?: number, signal?: AbortSignal) =>
  call<Reply>('POST', path, { body, ...(rev === undefined ? {} : { rev }), ...(signal ? { signal } : {}) })

const at = (loom: string) => `/looms/${encodeURIComponent(loom)}`
const on = (loom: string, node: number) => `${at(loom)}/nodes/${node}`

export type GrowAsked = Partial<Schemas['GrowNode']>
export type RunAsked = Partial<Schemas['StartRun']>

export const api = {
  // The server and its models
  server: () => get<Schemas['ServerObject']>('/server'),
  strategies: () => get<Schemas['StrategyList']>('/strategies'),
  models: () => get<Schemas['ModelList']>('/models'),
  loadModel: (body: Schemas['LoadModel']) => post<Schemas['JobReply']>('/models', body),
  unloadModel: (id: string, force = false) =>
    call<unknown>('DELETE', `/models/${encodeURIComponent(id)}`, { query: { force } }),
  kv: (looms = false) => get<Schemas['KvList']>('/kv', looms ? { looms } : {}),
  detokenize: (token_ids: number[], model?: string | null) =>
    post<Schemas['DetokenizeReply']>('/detokenize', { token_ids, model }),
  tokenize: (text: string, model?: string | null, signal?: AbortSignal) =>
    post<Schemas['TokenizeReply']>('/tokenize', { text, model, add_bos: false }, undefined, signal),

  // Looms
  looms: (search?: string, after?: string) =>
    get<Schemas['LoomPage']>('/looms', { search, after, limit: 100 }),
  loom: (loom: string) => get<Loom>(at(loom)),
  createLoom: (body: Partial<Schemas['CreateLoom']>) => post<Loom>('/looms', body),
  editLoom: (loom: string, body: Partial<Schemas['EditLoom']>) => call<Loom>('PATCH', at(loom), { body }),
  removeLoom: (loom: string) => call<unknown>('DELETE', at(loom)),
  restoreLooms: (body: unknown = {}) => post<Schemas['RestoredLooms']>('/looms/restore', body),
  history: (loom: string) => get<Schemas['OperationList']>(`${at(loom)}/history`),
  undo: (loom: string) => post<Changed>(`${at(loom)}/undo`),
  redo: (loom: string) => post<Changed>(`${at(loom)}/redo`),
  loomKv: (loom: string) => get<Schemas['LoomKv']>(`${at(loom)}/kv`),
  search: (loom: string, query: Query, signal?: AbortSignal) =>
    get<Schemas['HitList']>(`${at(loom)}/search`, query, signal),
  find: (q: string) => get<Schemas['HitList']>('/search', { q }),
  exportFile: async (loom: string, query: Query): Promise<{ file: Blob; name: string }> => {
    const answer = await send('GET', `${at(loom)}/export`, { query })
    const said = /filename="?([^";]+)/.exec(answer.headers.get('Content-Disposition') ?? '')
    return { file: await answer.blob(), name: said?.[1] ?? `${loom}.txt` }
  },
  importFile: (file: Blob, query: Query) =>
    call<Schemas['Imported']>('POST', '/import', { body: file, query }),

  // Nodes
  nodes: (loom: string, query: Query) => get<Schemas['NodePage']>(`${at(loom)}/nodes`, query),
  node: (loom: string, node: number, fields: string[] = []) => get<Node>(on(loom, node), { fields }),
  tokens: (
    loom: string,
    node: number,
    top = 0,
    span: { first?: number; last?: number; sampled?: boolean } = {},
  ) => get<Schemas['TokenList']>(`${on(loom, node)}/tokens`, { top, ...span }),
  next: (loom: string, node: number, body: Partial<Schemas['NextTokens']>, signal?: AbortSignal) =>
    post<Schemas['NextReply']>(`${on(loom, node)}/next`, body, undefined, signal),
  add: (loom: string, body: Partial<Schemas['AddNode']>) => post<Changed>(`${at(loom)}/nodes`, body),
  edit: (loom: string, node: number, body: Partial<Schemas['EditNode']>, rev?: number) =>
    call<Changed>('PATCH', on(loom, node), { body, ...(rev === undefined ? {} : { rev }) }),
  remove: (
    loom: string,
    node: number,
    what: 'node' | 'children' | 'siblings' | 'others',
    also: readonly number[] = [],
  ) => call<Changed>('DELETE', on(loom, node), { query: { what, also: also.map(String) } }),
  fork: (loom: string, node: number, body: Schemas['ForkNode']) =>
    post<Changed>(`${on(loom, node)}/fork`, body),
  split: (loom: string, node: number, body: Schemas['SplitNode']) =>
    post<Changed>(`${on(loom, node)}/split`, body),
  merge: (loom: string, node: number) => post<Changed>(`${on(loom, node)}/merge`),
  clip: (loom: string, node: number, body: Partial<Schemas['ClipNode']>) =>
    post<Changed>(`${on(loom, node)}/clip`, body),
  move: (loom: string, node: number, body: Schemas['MoveNode']) =>
    post<Changed>(`${on(loom, node)}/move`, body),
  copy: (loom: string, node: number, body: Partial<Schemas['CopyNode']>) =>
    post<Changed>(`${on(loom, node)}/copy`, body),
  forgetKv: (loom: string, keep: number | null) => post<Schemas['LoomKv']>(`${at(loom)}/kv`, { keep }),
  nodeKv: (loom: string, node: number, op: KvOp) => post<Node>(`${on(loom, node)}/kv`, { op }),

  // Growing
  grow: (loom: string, node: number, body: GrowAsked) =>
    post<Schemas['JobReply']>(`${on(loom, node)}/generate`, body),
  growMany: (loom: string, body: GrowAsked & { nodes: number[] | null }) =>
    post<Schemas['JobReply']>(`${at(loom)}/generate`, body),
  /** Grow, and answer when it has ended. */
  growWhole: (loom: string, node: number, body: GrowAsked) =>
    post<Schemas['JobReply']>(`${on(loom, node)}/generate`, { ...body, wait: true }),
  run: (loom: string, body: RunAsked) => post<Schemas['JobReply']>(`${at(loom)}/runs`, body),
  runs: (loom: string) => get<Schemas['JobList']>(`${at(loom)}/runs`, { limit: 10 }),
  job: (job: string) => get<Job>(`/jobs/${job}`),
  cancel: (job: string, branches: number[] | null = null) => post<Job>(`/jobs/${job}/cancel`, { branches }),
}
