/** The author's note of a loom: text that growth inserts into the context. */
import type { Loom } from '../api/client'

export interface AuthorNote {
  text: string
  /** Messages of a chat, or lines of other text, between the note and the end. */
  depth: number
}
const DEPTH = 4

/** Return the note in the meta of a loom; its text is empty if the loom has none. */
export function authorNoteOf(loom: Loom): AuthorNote {
  const note: Partial<AuthorNote> = Object(loom.meta?.['author_note'])
  return { text: note.text ?? '', depth: note.depth ?? DEPTH }
}

/** The position at which growth inserts a note: "before the last 4 messages". */
export function placeOf({ depth }: AuthorNote, isChat: boolean): string {
  const unit = isChat ? 'message' : 'line'
  if (depth === 0) return 'at the end'
  return depth === 1 ? `before the last ${unit}` : `before the last ${depth} ${unit}s`
}
