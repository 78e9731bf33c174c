/** The parser of Markdown with maths. It returns data, never markup. */
import { Marked, type Token, type TokenizerExtension } from 'marked'

export interface MathToken {
  type: 'math'
  raw: string
  text: string
  isBlock: boolean
}

const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[^\S\n]*(?:\n|$)/
const INLINE =
  /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d))/

function math(name: string, level: 'block' | 'inline', rule: RegExp, start: RegExp): TokenizerExtension {
  return {
    name,
    level,
    start: (source) => {
      const at = source.search(start)
      return at < 0 ? undefined : at
    },
    tokenizer: (source) => {
      const match = rule.exec(source)
      if (!match) return undefined
      const text = match.slice(1).find((each) => each !== undefined) ?? ''
      const isBlock = level === 'block' || /^(?:\$\$|\\\[)/.test(match[0])
      return { type: 'math', raw: match[0], text: text.trim(), isBlock }
    },
  }
}

const marked = new Marked({ gfm: true })
marked.use({
  extensions: [
    math('blockMath', 'block', BLOCK, /\$\$|\\\[/),
    math('inlineMath', 'inline', INLINE, /\$|\\\(|\\\[/),
  ],
})

export const parse = (text: string): Token[] => marked.lexer(text)

const NAMED: Record<string, string> = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0' }
const ENTITY = /&(?:#x([0-9a-f]{1,6})|#(\d{1,7})|(\w+));/gi

/** Replace the entities of XML and numbered ones by their characters. */
export function decoded(text: string): string {
  return text.replace(ENTITY, (all, hex?: string, decimal?: string, name?: string) => {
    if (name !== undefined) return NAMED[name] ?? all
    const code = hex === undefined ? Number(decimal) : Number.parseInt(hex, 16)
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all
  })
}
