/** The notes in the margin of a text: their positions, and which have no room. */

export interface MarginNote {
  node: number
  /** The top and the height of its line, in pixels. */
  top: number
  height: number
  /** It is never left out. */
  isFirm: boolean
}

const SLACK = 24 // px that a note may stand below its line: less than a line is high

/**
 * The tops of notes, in the order of the text. None stands on another; what would stand too far
 * below its line is left out, but for the last, before which others go.
 */
export function placeNotes(notes: readonly MarginNote[]): Map<number, number> {
  const kept: (MarginNote & { at: number })[] = []
  const below = () => {
    const last = kept[kept.length - 1]
    return last ? last.at + last.height : -Infinity
  }
  for (const [i, note] of notes.entries()) {
    const isLast = i === notes.length - 1
    while (isLast && below() > note.top + SLACK && !kept[kept.length - 1]!.isFirm) kept.pop()
    const at = Math.max(note.top, below())
    if (isLast || note.isFirm || at <= note.top + SLACK) kept.push({ ...note, at })
  }
  return new Map(kept.map((each) => [each.node, Math.round(each.at)]))
}
