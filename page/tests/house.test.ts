/** Rules of the page's own sources: what only tokens.css may define, and what no file may. */
import { describe, expect, it } from 'vitest'

const texts = import.meta.glob<string>('../src/**/*.{ts,tsx,css}', {
  query: '?raw',
  import: 'default',
  eager: true,
})
const files = Object.entries(texts)
  .map(([path, text]) => ({ name: path.replace('../src/', ''), text: withoutComments(text) }))
  .filter(({ name }) => !name.endsWith('schema.d.ts'))
const styles = files.filter(({ name }) => name.endsWith('.css'))

function withoutComments(text: string): string {
  return text.replace(/\/\*[\s\S]*?\*\//g, '').replace(/(^|\s)\/\/ .*$/gm, '$1')
}

/** The matches of a pattern, as "file: match". */
function matches(pattern: RegExp, among: readonly { name: string; text: string }[]): string[] {
  return among.flatMap(({ name, text }) =>
    [...text.matchAll(pattern)].map((hit) => `${name}: ${hit[0].trim()}`),
  )
}
const but = (...names: string[]) => files.filter(({ name }) => !names.includes(name))

describe('the sources of the page', () => {
  it('are all read', () => {
    expect(files.length).toBeGreaterThan(40)
    expect(styles.every(({ text }) => text.includes('{'))).toBe(true)
  })

  it('name colours in tokens.css only', () => {
    const elsewhere = but('tokens.css')
    expect(matches(/#(?:[0-9a-f]{8}|[0-9a-f]{6}|[0-9a-f]{3,4})\b(?!\/)/gi, elsewhere)).toEqual([])
    expect(matches(/\b(?:rgba?|hsla?|hwb|lab|lch|oklab|oklch)\(/gi, elsewhere)).toEqual([])
    const named =
      /(?:color|background|border|outline|fill|stroke)[\w-]*:[^;{}]*\b(?:white|black|red|green|blue|gr[ae]y|orange|yellow|silver)\b/gi
    expect(matches(named, styles)).toEqual([])
  })

  it('name sizes of type and durations in tokens.css only', () => {
    const elsewhere = styles.filter(({ name }) => name !== 'tokens.css' && name !== 'fonts.css')
    expect(matches(/\bfont(?:-family|-size)?:[^;]*\d(?:px|rem|pt)[^;]*;/g, elsewhere)).toEqual([])
    expect(matches(/\b(?:transition|animation)[\w-]*:[^;]*\b\d*\.?\d+m?s\b[^;]*;/g, elsewhere)).toEqual([])
  })

  it('make no markup of texts', () => {
    const ways =
      /\b(?:innerHTML|outerHTML|dangerouslySetInnerHTML|insertAdjacentHTML|DOMParser|srcdoc|createContextualFragment)\b|document\.write|\beval\(|new Function\(/g
    expect(matches(ways, files)).toEqual([])
  })

  it('request only from the server', () => {
    expect(matches(/(?:fetch|EventSource|import|url)\(\s*['"`]?(?:https?:)?\/\//g, files)).toEqual([])
    expect(matches(/@import\s+['"](?:https?:)?\/\//g, files)).toEqual([])
    expect(matches(/\b(?:sendBeacon|XMLHttpRequest|WebSocket|importScripts)\b/g, files)).toEqual([])
  })

  it('move with transform and opacity only', () => {
    const moved = matches(/\btransition(?:-property)?:([^;]*);/g, styles)
    const allowed =
      /transition(?:-property)?:\s*(?:none|(?:(?:opacity|transform)\s*(?:var\(--[a-z]+\))?\s*,?\s*)+);/
    expect(moved.filter((each) => !allowed.test(each))).toEqual([])
  })
})
