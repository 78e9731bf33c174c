/** Everything that happens in a loom, over one connection that mends itself. */
import { type ReadonlySignal, signal } from '@preact/signals'
import { BASE, type Job, type Node, type Schemas } from './client'

export interface BranchEvent {
  branch: number
  node: number
  id: string
  parent: number
  n_tokens?: number
  finish_reason?: string | null
  text?: string
  /** The model that grows it, if not the loom's. */
  model?: string | null
}
/** branch, token id (null: the rest of a character), text, log-probability, entropy */
export type TokenEvent = [number, number | null, string, number | string | null, number | string | null]

export interface FeedEvents {
  snapshot: { loom: string; rev: number; jobs: (Job & { texts: BranchEvent[] })[] }
  job: { job: string; model: string | null; branches: BranchEvent[]; asked?: Schemas['JobObject']['asked'] }
  tok: { job: string; t: TokenEvent[] }
  branch: {
    job: string
    branch: number
    node: number
    finish_reason: string | null
    stop_string: string | null
    ended: boolean
    n_tokens: number
    mean_logprob: number | string | null
    kept: boolean
  }
  score: { job: string } & Schemas['RoundObject']
  change: {
    rev: number
    kind: string
    added: Node[]
    changed: Node[]
    removed: number[]
    children: Record<string, number[]>
    whole: boolean
  }
  error: Schemas['ErrorDetail'] & { job: string }
  done: {
    job: string
    status: Job['status']
    usage?: Schemas['TokenUsage']
    result?: Schemas['RunResult']
  }
  renamed: { loom: string; name: string; title: string }
  removed: { loom: string }
}
export type FeedHandlers = { [Name in keyof FeedEvents]: (data: FeedEvents[Name]) => void }

const NAMES: (keyof FeedEvents)[] = [
  'snapshot',
  'job',
  'tok',
  'branch',
  'score',
  'change',
  'error',
  'done',
  'renamed',
  'removed',
]
/** A browser has six connections per server: a hidden tab closes its own. */
const HIDDEN_S = 5
const RECONNECT_MS = 100

/**
 * Follow a loom until closed. The first event is a snapshot; after a broken connection it goes on
 * where it broke, or with a new snapshot.
 */
export class Feed {
  private source: EventSource | null = null
  private last: string | null = null
  private retry: number | undefined
  private resting: number | undefined
  private readonly connected = signal(true)
  /** false while the server cannot be reached. */
  readonly isConnected: ReadonlySignal<boolean> = this.connected

  constructor(
    private readonly loom: string,
    private readonly handlers: FeedHandlers,
  ) {
    document.addEventListener('visibilitychange', this.look)
    if (!document.hidden) this.open()
  }

  close(): void {
    document.removeEventListener('visibilitychange', this.look)
    clearTimeout(this.retry)
    clearTimeout(this.resting)
    this.source?.close()
    this.source = null
    this.connected.value = true // nothing is waited for
  }

  private open(): void {
    clearTimeout(this.retry)
    const path = `/looms/${encodeURIComponent(this.loom)}/events`
    const query = `tokens=true${this.last === null ? '' : `&after=${encodeURIComponent(this.last)}`}`
    const source = new EventSource(`${BASE}${path}?${query}`)
    this.source = source
    let wasOpen = false
    source.onopen = () => {
      wasOpen = true
      this.connected.value = true
    }
    source.addEventListener('error', (event) => {
      if (event instanceof MessageEvent) return // an event of that name, not the connection
      if (this.source !== source) return
      if (wasOpen) {
        // The server let go of it, as it does when the loom gets its model: nothing is amiss yet.
        source.close()
        this.retry = window.setTimeout(() => this.open(), RECONNECT_MS)
        return
      }
      this.connected.value = false
      // The browser tries again by itself, unless it was answered with an error.
      if (source.readyState === EventSource.CLOSED) this.retry = window.setTimeout(() => this.open(), 2000)
    })
    for (const name of NAMES) {
      source.addEventListener(name, (event) => {
        if (!(event instanceof MessageEvent) || typeof event.data !== 'string') return
        if (event.lastEventId) this.last = event.lastEventId
        this.handlers[name](JSON.parse(event.data))
      })
    }
  }

  private readonly look = () => {
    clearTimeout(this.resting)
    if (document.hidden) {
      this.resting = window.setTimeout(() => {
        clearTimeout(this.retry)
        this.source?.close()
        this.source = null
      }, 1000 * HIDDEN_S)
    } else if (this.source === null) {
      this.open()
    }
  }
}
