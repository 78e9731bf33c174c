/** The searches of an open loom: their rounds, their results and the one that is shown. */
import { computed, signal } from '@preact/signals'
import { api, type Job, type Schemas } from '../api/client'
import { prunedIn, type Round, type RunResult } from '../model/run'
import { inspectorTab } from './view'

const NONE: ReadonlySet<number> = new Set()

/** A search in this loom, running or ended: its request, its rounds and its result. */
export interface LiveRun {
  job: string
  request: Record<string, unknown>
  rounds: readonly Round[]
  nodes: number[]
  status: Schemas['JobObject']['status']
  result: RunResult | null
  error: string
}

export class Searches {
  /** Searches, the newest last. */
  readonly runs = signal<readonly LiveRun[]>([])
  /** The one that is looked at, by its job, and up to which round; null: the newest, all of them. */
  readonly shownRun = signal<string | null>(null)
  readonly shownRound = signal<number | null>(null)
  readonly run = computed<LiveRun | null>(
    () => this.runs.value.find((each) => each.job === this.shownRun.value) ?? this.runs.value.at(-1) ?? null,
  )
  /** Nodes that a search generated: the page does not count their text as written by a person. */
  readonly searched = computed<ReadonlySet<number>>(
    () =>
      new Set(
        this.runs.value.flatMap((run) =>
          run.rounds.flatMap((each) => each.candidates.map((one) => one.node)),
        ),
      ),
  )
  /** Nodes that the search left behind, while it runs or is looked at: to be drawn dimmed. */
  readonly pruned = computed<ReadonlySet<number>>(() => {
    const run = this.run.value
    if (!run || (run.status !== 'running' && inspectorTab.value !== 'run')) return NONE
    return prunedIn(run.rounds, this.shownRound.value)
  })

  /** Add or update a search from the server's job. */
  adopt(job: Job): void {
    const update: Partial<LiveRun> = {
      status: job.status,
      rounds: job.rounds ?? [],
      result: job.result ?? null,
      error: job.error?.message ?? '',
    }
    this.note(job.id, job.asked ?? {})
    this.change(job.id, (run) => ({
      ...update,
      nodes: [...new Set([...run.nodes, ...(job.branches ?? []).map((each) => each.node)])],
    }))
  }

  /** Note a new search, and show it. */
  note(job: string, request: Record<string, unknown>): void {
    if (this.runs.peek().some((run) => run.job === job)) return
    const run: LiveRun = { job, request, rounds: [], nodes: [], status: 'running', result: null, error: '' }
    this.runs.value = [...this.runs.peek(), run]
    this.shownRun.value = null
    this.shownRound.value = null
  }

  change(job: string, change: (run: LiveRun) => Partial<LiveRun>): void {
    const runs = this.runs.peek()
    if (runs.some((run) => run.job === job))
      this.runs.value = runs.map((run) => (run.job === job ? { ...run, ...change(run) } : run))
  }

  /** Read a search that ended while the feed was disconnected. */
  reread(job: string): void {
    const lost = () => this.change(job, () => ({ status: 'interrupted' }))
    api.job(job).then((reply) => this.adopt(reply), lost)
  }
}
