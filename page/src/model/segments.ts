/** A long text in pieces that are laid out one by one: what changes at its end moves nothing before. */
import { RIGHT_TO_LEFT } from './words'

const LONG = 3000 // characters of a segment, at minimum

/**
 * Split a list of texts into runs of indices. Splits are between words only, and never inside text that runs from
 * right to left. They do not move when texts are added at the end.
 */
export function segments(texts: readonly string[]): number[][] {
  const result: number[][] = []
  let run: number[] = []
  let chars = 0
  let isPlain = true
  for (const [i, text] of texts.entries()) {
    const before = i > 0 ? texts[i - 1]! : ''
    if (chars >= LONG && isPlain && (/\s$/.test(before) || /^\s/.test(text))) {
      result.push(run)
      run = []
      chars = 0
    }
    if (!run.length) isPlain = true
    run.push(i)
    chars += text.length
    isPlain &&= !RIGHT_TO_LEFT.test(text)
  }
  if (run.length) result.push(run)
  return result
}
