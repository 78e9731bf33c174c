/** One branch while it grows: its text so far and how fast it comes. */
import { signal } from '@preact/signals'
import type { TokenEvent } from '../api/feed'

export type LaneState = 'waiting' | 'growing' | 'done' | 'failed'
const RATE_S = 2 // tok/s is that of the last so many seconds

export class Lane {
  text = ''
  nTokens = 0
  logprobs = 0
  nLogprobs = 0
  state: LaneState = 'waiting'
  finish: string | null = null
  error = ''
  kept = true
  /** Rises when there is something new to paint. */
  readonly version = signal(0)
  private readonly times: [number, number][] = []

  constructor(
    readonly job: string,
    readonly branch: number,
    readonly node: number,
    readonly parent: number,
    readonly model: string | null = null,
    readonly began = performance.now(),
  ) {}

  take(tokens: readonly TokenEvent[], now = performance.now()): void {
    for (const [, id, text, logprob] of tokens) {
      this.text += text
      if (id === null) continue
      this.nTokens += 1
      if (typeof logprob === 'number') {
        this.logprobs += logprob
        this.nLogprobs += 1
      }
    }
    this.state = 'growing'
    this.times.push([now, this.nTokens])
    while (this.times.length > 2 && now - this.times[0]![0] > 1000 * RATE_S) this.times.shift()
  }

  /** The geometric mean of the tokens' probabilities; null before there is one. */
  get meanP(): number | null {
    return this.nLogprobs ? Math.exp(this.logprobs / this.nLogprobs) : null
  }

  /** Tokens a second, of the last moments; null before there is a rate. */
  get rate(): number | null {
    const first = this.times[0]
    const last = this.times[this.times.length - 1]
    if (!first || !last || last[0] - first[0] < 100) return null
    return (1000 * (last[1] - first[1])) / (last[0] - first[0])
  }

  get isOver(): boolean {
    return this.state === 'done' || this.state === 'failed'
  }
}
