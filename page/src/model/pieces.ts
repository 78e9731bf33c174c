/** Where a node's tokens stand in the text that is shown of it. */

/** One token, or several that share a character. `end` is the place after its last letter. */
export interface Piece {
  /** Index of its first token in the node, and how many they are. */
  first: number
  count: number
  start: number
  end: number
}

interface TokenBytes {
  bytes: readonly number[]
}

/**
 * Find a node's tokens in its shown text; what is hidden (a template's tokens) has no piece.
 * null: the text is not made of these tokens, or their bytes are not known.
 */
export function piecesOf(tokens: readonly TokenBytes[], shown: string): Piece[] | null {
  const known = found.get(tokens)
  if (known?.shown === shown) return known.pieces
  const pieces = find(tokens, shown)
  found.set(tokens, { shown, pieces })
  return pieces
}

/** What was found last of a node's tokens: a long text is gone through once, not at every step in it. */
const found = new WeakMap<readonly TokenBytes[], { shown: string; pieces: Piece[] | null }>()

function find(tokens: readonly TokenBytes[], shown: string): Piece[] | null {
  const whole = decoded(tokens)
  if (!whole) return null
  const { pieces, text } = whole
  const at = placeOf(shown, text, pieces)
  if (at === null) return null
  const found: Piece[] = []
  for (const piece of pieces) {
    const start = Math.max(piece.start - at, 0)
    const end = Math.min(piece.end - at, shown.length)
    if (end > start) found.push({ ...piece, start, end })
  }
  return found
}

function decoded(tokens: readonly TokenBytes[]): { pieces: Piece[]; text: string } | null {
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true })
  const pieces: Piece[] = []
  let text = ''
  let missing = 0 // bytes that the last character still lacks
  let first = 0
  for (const [index, token] of tokens.entries()) {
    if (!token.bytes.length) return null
    const start = pieces.length ? pieces[pieces.length - 1]!.end : 0
    text += decoder.decode(new Uint8Array(token.bytes), { stream: true })
    for (const byte of token.bytes) missing = lacks(byte, missing)
    const isLast = index === tokens.length - 1
    if (isLast) text += decoder.decode()
    if (missing && !isLast) continue
    pieces.push({ first, count: index - first + 1, start, end: text.length })
    first = index + 1
  }
  return { pieces, text }
}

/** How many bytes a character lacks after one more. */
function lacks(byte: number, missing: number): number {
  if (missing && (byte & 0xc0) === 0x80) return missing - 1
  if (byte >= 0xc2 && byte < 0xe0) return 1
  if (byte >= 0xe0 && byte < 0xf0) return 2
  if (byte >= 0xf0 && byte < 0xf5) return 3
  return 0
}

/** Where the shown text begins: between two tokens, if there is such a place. */
function placeOf(shown: string, text: string, pieces: readonly Piece[]): number | null {
  if (shown === text) return 0
  const starts = new Set(pieces.map((each) => each.start))
  const first = text.indexOf(shown)
  for (let at = first; at >= 0 && at < text.length; at = text.indexOf(shown, at + 1))
    if (starts.has(at)) return at
  return first < 0 ? null : first
}

/** The piece that a place in the text lies in; of an empty list none. */
export function pieceAt(pieces: readonly Piece[], offset: number): Piece | undefined {
  return pieces.find((each) => offset < each.end) ?? pieces[pieces.length - 1]
}

/** The piece that has a token. */
export const pieceOf = (pieces: readonly Piece[], token: number): Piece | undefined =>
  pieces.find((each) => token >= each.first && token < each.first + each.count)
