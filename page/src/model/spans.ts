/** Find the spans of a pattern in a text. */
export type Span = readonly [from: number, to: number]

const MAX_SPANS = 100 // of a text that are marked

/** Spans that a pattern is true of. It takes as long as the pattern makes it. */
export function spansOf(text: string, wanted: RegExp): Span[] {
  const spans: Span[] = []
  for (const match of text.matchAll(wanted)) {
    if (match[0]) spans.push([match.index, match.index + match[0].length])
    if (spans.length >= MAX_SPANS) break
  }
  return spans
}
