/** The next tokens at a node, requested after the user has stayed there for a moment. */
import { useEffect, useState } from 'preact/hooks'
import { ApiError, api, type Schemas } from '../../api/client'

const PAUSE_MS = 120
const LOOK_MS = 220
/** Rows that have keys: these are looked ahead of. */
export const KEYED = 9

export interface NextRequest {
  loom: string
  node: number
  /** Changes when the node does: the same node may have another text. */
  version: string
  top: number
  ahead: number
  drawing: Partial<Schemas['NextTokens']>
}

export interface NextState {
  node: number
  reply: Schemas['NextReply'] | null
  ahead: ReadonlyMap<number, string>
  error: string
  isBusy: boolean
}

const NOTHING: NextState = { node: -1, reply: null, ahead: new Map(), error: '', isBusy: true }

/** request: null: nothing to load. The last result stays until the next one arrives. */
export function useNext(request: NextRequest | null): NextState {
  const [state, setState] = useState<NextState>(NOTHING)
  const key = JSON.stringify(request)
  useEffect(() => {
    if (!request) return
    const gone = new AbortController()
    const timer = setTimeout(async () => {
      try {
        const { loom, node, top, drawing } = request
        const reply = await api.next(loom, node, { top, ...drawing }, gone.signal)
        setState({ node, reply, ahead: new Map(), error: '', isBusy: false })
        if (!request.ahead) return
        const candidates = reply.next.slice(0, KEYED).map((each) => each.id)
        const far = await api.next(loom, node, { top: 1, candidates, ahead: request.ahead }, gone.signal)
        const ahead = new Map((far.candidates ?? []).map((each) => [each.id, each.ahead ?? '']))
        setState({ node, reply, ahead, error: '', isBusy: false })
      } catch (error) {
        if (gone.signal.aborted) return
        setState({ ...NOTHING, node: request.node, error: messageOf(error), isBusy: false })
      }
    }, PAUSE_MS)
    setState((before) => ({ ...before, isBusy: true }))
    return () => {
      clearTimeout(timer)
      gone.abort()
    }
  }, [key])
  return state
}

export interface Lookup {
  /** The text as tokens: only the first of each way to read it can be looked up. */
  chances: Schemas['TokenCandidate'][]
  error: string
}

/** Look any token up by its text, as it would stand at the beginning of a word and within one. */
export function useLookup(request: NextRequest | null, text: string): Lookup {
  const [lookup, setLookup] = useState<Lookup>({ chances: [], error: '' })
  const key = JSON.stringify([request?.loom, request?.node, request?.version, request?.drawing, text])
  useEffect(() => {
    if (!request || text === '') {
      setLookup({ chances: [], error: '' })
      return
    }
    const gone = new AbortController()
    const timer = setTimeout(async () => {
      try {
        const candidates = await firstTokens(text, gone.signal)
        const reply = await api.next(
          request.loom,
          request.node,
          { top: 1, candidates, ...request.drawing },
          gone.signal,
        )
        setLookup({ chances: reply.candidates ?? [], error: '' })
      } catch (error) {
        if (!gone.signal.aborted) setLookup({ chances: [], error: messageOf(error) })
      }
    }, LOOK_MS)
    return () => {
      clearTimeout(timer)
      gone.abort()
    }
  }, [key])
  return lookup
}

async function firstTokens(text: string, signal: AbortSignal): Promise<number[]> {
  const id = /^#(\d{1,9})$/.exec(text)
  if (id) return [Number(id[1])]
  const ways = text.startsWith(' ') ? [text] : [text, ` ${text}`]
  const read = await Promise.all(ways.map((each) => api.tokenize(each, null, signal)))
  return [...new Set(read.map((each) => each.token_ids[0]).filter((each) => each !== undefined))]
}

function messageOf(error: unknown): string {
  if (error instanceof ApiError) return [error.message, error.hint].filter(Boolean).join('. ')
  return error instanceof Error ? error.message : String(error)
}
