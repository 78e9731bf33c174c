/** Search for a pattern in a worker: a pattern that never ends does not block the page. */
import type { Candidate, Match } from '../model/finding'
import { spansOf } from '../model/spans'

export interface Task {
  wanted: RegExp
  texts: readonly Candidate[]
}
/** The hits since the last message. */
export interface Finds {
  matches: readonly Match[]
  isDone: boolean
}

const AT_ONCE = 100 // the hits of a full list are sent one by one: the next text may be the one that never ends
const EACH_MS = 50

addEventListener('message', ({ data: { wanted, texts } }: MessageEvent<Task>) => {
  let matches: Match[] = []
  let n = 0
  let last = performance.now()
  const report = (isDone: boolean) => {
    postMessage({ matches, isDone } satisfies Finds)
    matches = []
    last = performance.now()
  }
  report(false) // it has begun
  for (const candidate of texts) {
    const spans = spansOf(candidate.text, wanted)
    if (!spans.length) continue
    matches.push({ ...candidate, spans })
    n += 1
    if (n <= AT_ONCE || performance.now() - last > EACH_MS) report(false)
  }
  report(true)
})
