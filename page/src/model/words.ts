/** Numbers and texts as the page writes them. */

/** An integer with its digits in groups of three: 18,902. */
export function formatCount(value: number): string {
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, ',')
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${formatCount(value)} ${value === 1 ? one : many}`
}

export function bytes(value: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let at = 0
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000
    at += 1
  }
  return `${value < 10 && at > 0 ? value.toFixed(1) : Math.round(value)} ${units[at]}`
}

/** A probability in per cent: two digits at most, and one below a tenth. */
export function probability(p: number | null): string {
  if (p === null) return '–'
  const value = 100 * p
  if (value > 0 && value < 0.095) return '<\u202f0.1\u202f%'
  return `${value < 9.5 ? Number(value.toPrecision(1)) : Math.round(value)}\u202f%`
}

/** A model's name without its folder, its owner and its file type. */
export function shortName(model: string): string {
  const parts = model.split(/[\\/]/).filter(Boolean)
  return (parts.at(-1) ?? model).replace(/\.(?:gguf|safetensors)$/i, '')
}

/** A loom's title as typed; without one its name, which its address has. */
export const titleOf = (loom: { name: string; title?: string | undefined }): string => loom.title || loom.name

/** A probability as text for a field in per cent: 0.25 → "25". */
export const inPercent = (p: number): string => String(Number((100 * p).toPrecision(6)))

export const averageProbability = (p: number): string => `avg. probability ${probability(p)}`

/** The title with the first free number from 2, in place of a number that it has: "Capital of Italy (2)". */
export function numberedTitle(title: string, taken: readonly string[]): string {
  const base = title.replace(/ \(\d+\)$/, '')
  let n = 2
  while (taken.includes(`${base} (${n})`)) n += 1
  return `${base} (${n})`
}

export function seconds(value: number): string {
  if (value < 10) return `${value.toFixed(1)} s`
  if (value < 90) return `${Math.round(value)} s`
  return value < 5400 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`
}

/** Text on one line: white space becomes single blanks, and at most `most` characters stay. */
export function oneLine(text: string, maxLength = 80): string {
  const line = text.replace(/\s+/g, ' ').trim()
  const points = Array.from(line.length > 4 * maxLength ? line.slice(0, 4 * maxLength) : line)
  return points.length > maxLength
    ? `${beginning(line, points.slice(0, maxLength - 1).join('').length)}…`
    : line
}

const graphemes = new Intl.Segmenter(undefined, { granularity: 'grapheme' })
const FAR = 64 // units around a cut in which a grapheme must end

/** The first units of a text. A grapheme, such as a flag or a family emoji, is not split. */
export function beginning(text: string, maxLength: number): string {
  if (text.length <= maxLength) return text
  const at = graphemes.segment(text.slice(0, maxLength + FAR)).containing(maxLength)?.index
  // A grapheme without an end is split, a surrogate pair is not.
  return text.slice(0, at || maxLength).replace(/[\ud800-\udbff]$/, '')
}

/** The last units of a text. Graphemes are not split. */
export function ending(text: string, maxLength: number): string {
  if (text.length <= maxLength) return text
  const from = text.length - maxLength
  const { index, segment } = graphemes.segment(text).containing(from)!
  return text.slice(index === from ? from : index + segment.length)
}

export const RIGHT_TO_LEFT =
  /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]|\ud802[\udc00-\udfff]|\ud83a[\udc00-\udeff]/

/** Return true if a text runs from right to left, as its first strong character does. */
export const isRightToLeft = (text: string): boolean => RIGHT_TO_LEFT.test(/\p{L}/u.exec(text)?.[0] ?? '')

/** Show white space as symbols, in the heat and in the token card. */
export function showWhitespace(text: string): string {
  return text.replace(/\n/g, '⏎').replace(/\t/g, '→').replace(/ /g, '·')
}

const FINISH: Record<string, string> = {
  stop: 'ended',
  length: 'stopped at limit',
  context: 'context full',
  cancelled: 'stopped',
  interrupted: 'interrupted',
  error: 'failed',
}

/** Why a node ended, in a word; of a stop text the text. */
export function finishWord(reason: string | null, stopString: string | null = null): string {
  if (reason === null) return ''
  return reason === 'stop' && stopString
    ? `stopped at ${JSON.stringify(stopString)}`
    : (FINISH[reason] ?? reason)
}
