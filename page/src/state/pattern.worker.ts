/** Looks for a pattern in texts, beside the page: while one takes for ever, the page goes on. */
import type { Candidate, Found } from '../model/finding'
import { spansOf } from '../model/spans'

export interface Task {
  wanted: RegExp
  texts: readonly Candidate[]
}
/** What was found since the last word of it. */
export interface Finds {
  found: readonly Found[]
  isDone: boolean
}

const AT_ONCE = 100 // as many as a list shows are told one by one: the next text may be where it ends
const EACH_MS = 50

addEventListener('message', ({ data: { wanted, texts } }: MessageEvent<Task>) => {
  let found: Found[] = []
  let n = 0
  let last = performance.now()
  const tell = (isDone: boolean) => {
    postMessage({ found, isDone } satisfies Finds)
    found = []
    last = performance.now()
  }
  tell(false) // it has begun
  for (const each of texts) {
    const spans = spansOf(each.text, wanted)
    if (!spans.length) continue
    found.push({ ...each, spans })
    n += 1
    if (n <= AT_ONCE || performance.now() - last > EACH_MS) tell(false)
  }
  tell(true)
})
