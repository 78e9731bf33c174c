/** The native API: one typed call for each route that the page uses, and its errors. */
import createClient from 'openapi-fetch'
import type { components, paths } from './schema'

export type Schemas = components['schemas']
export type KvOp = Schemas['KvRequest']['op']
export type Node = Schemas['NodeObject']
export type Loom = Schemas['LoomObject']
export type Model = Schemas['ModelObject']
export type Job = Schemas['JobObject']
export type Changed = Schemas['Changed']
export type TokenCandidate = Schemas['TokenCandidate']
export type Token = Schemas['TokenObject']

/** An error response of the server. status 0: the server could not be reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly hint: string = '',
    readonly param: string | null = null,
    readonly details: Record<string, unknown> = {},
    readonly requestId: string = '',
    /** Seconds to wait before a retry; null: unknown. */
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

export const BASE = '/api/v1'

let lost: () => void = () => {}
/** Call this whenever a request did not reach the server. */
export const whenLost = (call: () => void): void => {
  lost = call
}

const { GET, POST, PATCH, DELETE } = createClient<paths>({
  baseUrl: `${globalThis.location?.origin ?? ''}${BASE}`,
  headers: { 'X-Weft-Actor': 'page' },
  fetch: send,
})

async function send(request: Request): Promise<Response> {
  let answer: Response
  try {
    answer = await fetch(request)
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error
    lost()
    throw new ApiError(0, 'unreachable', 'The server does not answer.', 'Is weft serve still running?')
  }
  if (!answer.ok) throw await refused(answer)
  return answer
}

/** The data of a reply; `send` has thrown for all others. */
async function reply<Data>(call: Promise<{ data?: Data }>): Promise<NonNullable<Data>> {
  return (await call).data!
}

const LOADING = 'The model is still loading. Try again when it is ready.'

async function refused(answer: Response): Promise<ApiError> {
  const body: Schemas['ErrorReply'] | null = await answer.json().catch(() => null)
  const error = body?.error
  if (!error) return new ApiError(answer.status, 'error', `The server answered ${answer.status}.`)
  const retryAfter = Number(answer.headers.get('Retry-After') ?? NaN)
  return new ApiError(
    answer.status,
    error.code,
    error.code === 'model_loading' ? LOADING : error.message,
    error.hint ?? '',
    error.param ?? null,
    error.details ?? {},
    error.request_id ?? '',
    Number.isFinite(retryAfter) ? retryAfter : null,
  )
}

/** The address of a loom's or a node's route, and of a change at a revision. */
const at = (loom: string) => ({ path: { loom } })
const on = (loom: string, node: number) => ({ path: { loom, node: String(node) } })
const since = (rev?: number) => (rev === undefined ? {} : { header: { 'if-match': String(rev) } })
const until = (signal?: AbortSignal) => (signal ? { signal } : {})

type Paths = keyof paths
type QueryOf<Path extends Paths> = paths[Path] extends { get: { parameters: { query?: infer Query } } }
  ? NonNullable<Query>
  : never

export type GrowRequest = Partial<Schemas['GrowNode']>
export type RunRequest = Partial<Schemas['StartRun']>

export const api = {
  // The server and its models
  server: () => reply(GET('/server')),
  strategies: () => reply(GET('/strategies')),
  models: () => reply(GET('/models')),
  loadModel: (body: Schemas['LoadModel']) => reply(POST('/models', { body })),
  unloadModel: (model: string, force = false) =>
    reply(DELETE('/models/{model}', { params: { path: { model }, query: { force } } })),
  kv: (looms = false) => reply(GET('/kv', { params: { query: looms ? { looms } : {} } })),
  detokenize: (token_ids: number[], model: string | null = null) =>
    reply(POST('/detokenize', { body: { token_ids, model } })),
  tokenize: (text: string, model: string | null = null, signal?: AbortSignal) =>
    reply(POST('/tokenize', { body: { text, model, add_bos: false }, ...until(signal) })),

  // Looms
  looms: (search?: string, after?: string) =>
    reply(GET('/looms', { params: { query: { search, after, limit: 100 } } })),
  loom: (loom: string) => reply(GET('/looms/{loom}', { params: at(loom) })),
  createLoom: (body: Schemas['CreateLoom']) => reply(POST('/looms', { body })),
  editLoom: (loom: string, body: Schemas['EditLoom']) =>
    reply(PATCH('/looms/{loom}', { params: at(loom), body })),
  removeLoom: (loom: string) => reply(DELETE('/looms/{loom}', { params: at(loom) })),
  restoreLooms: () => reply(POST('/looms/restore')),
  history: (loom: string) => reply(GET('/looms/{loom}/history', { params: at(loom) })),
  undo: (loom: string) => reply(POST('/looms/{loom}/undo', { params: at(loom) })),
  redo: (loom: string) => reply(POST('/looms/{loom}/redo', { params: at(loom) })),
  loomKv: (loom: string) => reply(GET('/looms/{loom}/kv', { params: at(loom) })),
  search: (loom: string, query: QueryOf<'/looms/{loom}/search'>, signal?: AbortSignal) =>
    reply(GET('/looms/{loom}/search', { params: { ...at(loom), query }, ...until(signal) })),
  find: (q: string) => reply(GET('/search', { params: { query: { q } } })),
  exportFile: async (
    loom: string,
    query: QueryOf<'/looms/{loom}/export'>,
  ): Promise<{ file: Blob; name: string }> => {
    const params = { ...at(loom), query }
    const { data, response } = await GET('/looms/{loom}/export', { params, parseAs: 'blob' })
    const name = /filename="?([^";]+)/.exec(response.headers.get('Content-Disposition') ?? '')
    return { file: data ?? new Blob(), name: name?.[1] ?? `${loom}.txt` }
  },
  importFile: (body: Blob, query: paths['/import']['post']['parameters']['query']) =>
    reply(
      POST('/import', {
        params: { query },
        body,
        bodySerializer: () => body,
        headers: { 'Content-Type': null },
      }),
    ),

  // Nodes
  nodes: (loom: string, query: QueryOf<'/looms/{loom}/nodes'>) =>
    reply(GET('/looms/{loom}/nodes', { params: { ...at(loom), query } })),
  node: (loom: string, node: number, fields: QueryOf<'/looms/{loom}/nodes/{node}'>['fields'] = []) =>
    reply(GET('/looms/{loom}/nodes/{node}', { params: { ...on(loom, node), query: { fields } } })),
  tokens: (
    loom: string,
    node: number,
    top = 0,
    span: { first?: number; last?: number; sampled?: boolean } = {},
  ) =>
    reply(
      GET('/looms/{loom}/nodes/{node}/tokens', { params: { ...on(loom, node), query: { top, ...span } } }),
    ),
  next: (loom: string, node: number, body: Schemas['NextTokens'], signal?: AbortSignal) =>
    reply(POST('/looms/{loom}/nodes/{node}/next', { params: on(loom, node), body, ...until(signal) })),
  add: (loom: string, body: Schemas['AddNode']) =>
    reply(POST('/looms/{loom}/nodes', { params: at(loom), body })),
  edit: (loom: string, node: number, body: Schemas['EditNode'], rev?: number) =>
    reply(PATCH('/looms/{loom}/nodes/{node}', { params: { ...on(loom, node), ...since(rev) }, body })),
  remove: (
    loom: string,
    node: number,
    what: 'node' | 'children' | 'siblings' | 'others',
    also: readonly number[] = [],
  ) => {
    const params = { ...on(loom, node), query: { what, also: also.map(String) } }
    return reply(DELETE('/looms/{loom}/nodes/{node}', { params }))
  },
  fork: (loom: string, node: number, body: Schemas['ForkNode']) =>
    reply(POST('/looms/{loom}/nodes/{node}/fork', { params: on(loom, node), body })),
  split: (loom: string, node: number, body: Schemas['SplitNode']) =>
    reply(POST('/looms/{loom}/nodes/{node}/split', { params: on(loom, node), body })),
  merge: (loom: string, node: number) =>
    reply(POST('/looms/{loom}/nodes/{node}/merge', { params: on(loom, node) })),
  clip: (loom: string, node: number, body: Schemas['ClipNode']) =>
    reply(POST('/looms/{loom}/nodes/{node}/clip', { params: on(loom, node), body })),
  move: (loom: string, node: number, body: Schemas['MoveNode']) =>
    reply(POST('/looms/{loom}/nodes/{node}/move', { params: on(loom, node), body })),
  /** Copy a node into a new loom. */
  copyToLoom: async (loom: string, node: number, body: Schemas['CopyNode']): Promise<Loom> => {
    const copy = await reply(POST('/looms/{loom}/nodes/{node}/copy', { params: on(loom, node), body }))
    if (!('name' in copy)) throw new TypeError('The copy is not a loom.')
    return copy
  },
  forgetKv: (loom: string, keep: number | null) =>
    reply(POST('/looms/{loom}/kv', { params: at(loom), body: { keep } })),
  nodeKv: (loom: string, node: number, op: KvOp) =>
    reply(POST('/looms/{loom}/nodes/{node}/kv', { params: on(loom, node), body: { op } })),

  // Growing
  grow: (loom: string, node: number, body: GrowRequest) =>
    reply(POST('/looms/{loom}/nodes/{node}/generate', { params: on(loom, node), body })),
  growMany: (loom: string, body: GrowRequest & { nodes: number[] | null }) =>
    reply(POST('/looms/{loom}/generate', { params: at(loom), body })),
  /** Grow, and answer when it has ended. */
  growAndWait: (loom: string, node: number, body: GrowRequest) =>
    reply(
      POST('/looms/{loom}/nodes/{node}/generate', { params: on(loom, node), body: { ...body, wait: true } }),
    ),
  run: (loom: string, body: RunRequest) => reply(POST('/looms/{loom}/runs', { params: at(loom), body })),
  runs: (loom: string) => reply(GET('/looms/{loom}/runs', { params: { ...at(loom), query: { limit: 10 } } })),
  job: (job: string) => reply(GET('/jobs/{job}', { params: { path: { job } } })),
  cancel: (job: string, branches: number[] | null = null) =>
    reply(POST('/jobs/{job}/cancel', { params: { path: { job } }, body: { branches } })),
}
