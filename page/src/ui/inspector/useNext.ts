/** The next tokens at a node: asked for a moment after one has come there, told as long as one stays. */
import { useEffect, useState } from 'preact/hooks'
import { ApiError, api, type Schemas } from '../../api/client'

const PAUSE_MS = 120
const LOOK_MS = 220
/** Rows that have keys: these are looked ahead of. */
export const KEYED = 9

export interface Asked {
  loom: string
  node: number
  /** Changes when the node does: the same node may have another text. */
  version: string
  top: number
  ahead: number
  drawing: Partial<Schemas['NextTokens']>
}

export interface Told {
  node: number
  reply: Schemas['NextReply'] | null
  ahead: ReadonlyMap<number, string>
  error: string
  isBusy: boolean
}

const NOTHING: Told = { node: -1, reply: null, ahead: new Map(), error: '', isBusy: true }

/** asked: null while there is nothing to ask. What was told stays until something else is. */
export function useNext(asked: Asked | null): Told {
  const [told, setTold] = useState<Told>(NOTHING)
  const key = JSON.stringify(asked)
  useEffect(() => {
    if (!asked) return
    const gone = new AbortController()
    const timer = setTimeout(async () => {
      try {
        const { loom, node, top, drawing } = asked
        const reply = await api.next(loom, node, { top, ...drawing }, gone.signal)
        setTold({ node, reply, ahead: new Map(), error: '', isBusy: false })
        if (!asked.ahead) return
        const candidates = reply.next.slice(0, KEYED).map((each) => each.id)
        const far = await api.next(loom, node, { top: 1, candidates, ahead: asked.ahead }, gone.signal)
        const ahead = new Map((far.candidates ?? []).map((each) => [each.id, each.ahead ?? '']))
        setTold({ node, reply, ahead, error: '', isBusy: false })
      } catch (error) {
        if (gone.signal.aborted) return
        setTold({ ...NOTHING, node: asked.node, error: said(error), isBusy: false })
      }
    }, PAUSE_MS)
    setTold((before) => ({ ...before, isBusy: true }))
    return () => {
      clearTimeout(timer)
      gone.abort()
    }
  }, [key])
  return told
}

export interface Found {
  /** The text as tokens: only the first of each way to read it can be looked up. */
  chances: Schemas['TokenCandidate'][]
  error: string
}

/** Look any token up by its text, as it would stand at the beginning of a word and within one. */
export function useLookup(asked: Asked | null, text: string): Found {
  const [found, setFound] = useState<Found>({ chances: [], error: '' })
  const key = JSON.stringify([asked?.loom, asked?.node, asked?.version, asked?.drawing, text])
  useEffect(() => {
    if (!asked || text === '') {
      setFound({ chances: [], error: '' })
      return
    }
    const gone = new AbortController()
    const timer = setTimeout(async () => {
      try {
        const candidates = await firstTokens(text, gone.signal)
        const reply = await api.next(
          asked.loom,
          asked.node,
          { top: 1, candidates, ...asked.drawing },
          gone.signal,
        )
        setFound({ chances: reply.candidates ?? [], error: '' })
      } catch (error) {
        if (!gone.signal.aborted) setFound({ chances: [], error: said(error) })
      }
    }, LOOK_MS)
    return () => {
      clearTimeout(timer)
      gone.abort()
    }
  }, [key])
  return found
}

async function firstTokens(text: string, signal: AbortSignal): Promise<number[]> {
  const id = /^#(\d{1,9})$/.exec(text)
  if (id) return [Number(id[1])]
  const ways = text.startsWith(' ') ? [text] : [text, ` ${text}`]
  const read = await Promise.all(ways.map((each) => api.tokenize(each, null, signal)))
  return [...new Set(read.map((each) => each.token_ids[0]).filter((each) => each !== undefined))]
}

function said(error: unknown): string {
  if (error instanceof ApiError) return [error.message, error.hint].filter(Boolean).join('. ')
  return error instanceof Error ? error.message : String(error)
}
