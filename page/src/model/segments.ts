/** A long text in pieces that are laid out one by one: what changes at its end moves nothing before. */
import { RIGHT_TO_LEFT } from './words'

const LONG = 3000 // letters of a segment, at least

/**
 * Cut a list of texts into runs of indices. It is cut between words only, and nowhere in a script
 * that runs from right to left; the cuts stay where they are when texts are added at the end.
 */
export function segments(texts: readonly string[]): number[][] {
  const found: number[][] = []
  let run: number[] = []
  let letters = 0
  let isPlain = true
  for (const [i, text] of texts.entries()) {
    const before = i > 0 ? texts[i - 1]! : ''
    if (letters >= LONG && isPlain && (/\s$/.test(before) || /^\s/.test(text))) {
      found.push(run)
      run = []
      letters = 0
    }
    if (!run.length) isPlain = true
    run.push(i)
    letters += text.length
    isPlain &&= !RIGHT_TO_LEFT.test(text)
  }
  if (run.length) found.push(run)
  return found
}
