/** The search for a regular expression: in a worker, for a time that is bounded. */
import type { Match } from '../model/finding'
import type { Finds, Task } from './pattern.worker'
import address from './pattern.worker?worker&url'

const LIMIT_MS = 1000 // some patterns never end
const WORD_MS = 150 // a longer search shows that it is busy

/** The result of a search so far. */
export interface Answer {
  matches: readonly Match[]
  state: 'busy' | 'done' | 'cut' | 'failed'
}

interface Policies {
  createPolicy(
    name: string,
    rules: { createScriptURL: (url: string) => string },
  ): { createScriptURL: (url: string) => string }
}

/** The page's policy takes no string as a script's address; this one was built with the page. */
function trusted(): string {
  const policies = (globalThis as { trustedTypes?: Policies }).trustedTypes
  return (
    policies?.createPolicy('weft', { createScriptURL: () => address }).createScriptURL(address) ?? address
  )
}
let script: string | undefined

/** One search at a time: another one takes its place. */
export class PatternSearch {
  private worker: Worker | null = null
  private isBusy = false
  private limit: number | undefined
  private word: number | undefined

  /** Search for a pattern. Calls back with the first hits, with "busy" after a while, and at the end. */
  ask(task: Task, onAnswer: (answer: Answer) => void): void {
    if (this.isBusy) this.end() // it may be where it never gets out of
    clearTimeout(this.word)
    const matches: Match[] = []
    const finish = (state: Answer['state']) => {
      if (state === 'done') this.rest()
      else this.end()
      onAnswer({ matches, state })
    }
    script ??= trusted()
    this.worker ??= new Worker(script, { type: 'module', name: 'pattern' })
    this.worker.onmessage = ({ data }: MessageEvent<Finds>) => {
      this.limit ??= window.setTimeout(() => finish('cut'), LIMIT_MS) // from when it has begun
      matches.push(...data.matches)
      if (data.isDone) finish('done')
    }
    this.worker.onerror = () => finish('failed')
    this.isBusy = true
    this.word = window.setTimeout(() => onAnswer({ matches: [...matches], state: 'busy' }), WORD_MS)
    this.worker.postMessage(task)
  }

  /** Stop what is under way. */
  end(): void {
    this.worker?.terminate()
    this.worker = null
    this.rest()
  }

  private rest(): void {
    clearTimeout(this.limit)
    clearTimeout(this.word)
    this.limit = undefined
    this.isBusy = false
  }
}
