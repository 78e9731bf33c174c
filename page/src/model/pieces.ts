/** The positions of a node's tokens in its shown text. */

/** One token, or several that share a character. `end` is the position after its last character. */
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
 * Find a node's tokens in its shown text. Hidden tokens (of a template) have no piece.
 * null: the tokens do not match the text, or their bytes are unknown.
 */
export function piecesOf(tokens: readonly TokenBytes[], shown: string): Piece[] | null {
  const known = cache.get(tokens)
  if (known?.shown === shown) return known.pieces
  const pieces = find(tokens, shown)
  cache.set(tokens, { shown, pieces })
  return pieces
}

/** The last result per list of tokens: a long text is searched once, not at every cursor step. */
const cache = new WeakMap<readonly TokenBytes[], { shown: string; pieces: Piece[] | null }>()

function find(tokens: readonly TokenBytes[], shown: string): Piece[] | null {
  const decodedTokens = decoded(tokens)
  if (!decodedTokens) return null
  const { pieces, text } = decodedTokens
  const at = placeOf(shown, text, pieces)
  if (at === null) return null
  const result: Piece[] = []
  for (const piece of pieces) {
    const start = Math.max(piece.start - at, 0)
    const end = Math.min(piece.end - at, shown.length)
    if (end > start) result.push({ ...piece, start, end })
  }
  return result
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
    for (const byte of token.bytes) missing = missingBytes(byte, missing)
    const isLast = index === tokens.length - 1
    if (isLast) text += decoder.decode()
    if (missing && !isLast) continue
    pieces.push({ first, count: index - first + 1, start, end: text.length })
    first = index + 1
  }
  return { pieces, text }
}

/** How many bytes a character lacks after one more. */
function missingBytes(byte: number, missing: number): number {
  if (missing && (byte & 0xc0) === 0x80) return missing - 1
  if (byte >= 0xc2 && byte < 0xe0) return 1
  if (byte >= 0xe0 && byte < 0xf0) return 2
  if (byte >= 0xf0 && byte < 0xf5) return 3
  return 0
}

/** The position of the shown text in the full one: between two tokens, if there is such a position. */
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
