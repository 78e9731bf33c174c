/** Detect texts that benefit from a Markdown view; the parser is loaded only for these. */

const MARKS = [
  /^ {0,3}(?:#{1,6}\s|>\s?|```|~~~|[-*+]\s|\d{1,9}[.)]\s|(?:[-*_] ?){3,}$)/m, // blocks
  /^\s*\|?\s*:?-+:?\s*\|/m, // the second line of a table
  /`[^`\n]+`/,
  /\*\*?\S|~~\S|(?:^|\W)__?\S/,
  /\]\(|<https?:/,
  /\$\$|\\\(|\\\[|\$[^\s$][^$\n]*\$/, // maths
]

/** Return true if a text has Markdown marks. Texts without marks are shown token by token. */
export const hasMarkdown = (text: string): boolean => MARKS.some((each) => each.test(text))

/** Return a link's address if it leads to a website or a mail address, else null. */
export function safeLink(href: string): string | null {
  try {
    const { protocol } = new URL(href)
    return ['http:', 'https:', 'mailto:'].includes(protocol) ? href : null
  } catch {
    return null
  }
}
