/** The lines of the outline: where rows stand, what hangs from what, and the thread along a path. */
import type { Outline } from './outline'

export const ROW = 28
const LEFT = 16
const CORNER = 6
/** How far a level goes in; deep ones go in less, and the deepest not at all. */
const STEPS: readonly (readonly [levels: number, step: number])[] = [
  [8, 13],
  [16, 3],
]

/** Lines of deep levels stand close together: those that go further than so many rows are left out. */
const NEAR = 24

/** The x position, in pixels, of the line below rows of a depth. */
export function indent(depth: number): number {
  let x = LEFT
  for (const [levels, step] of STEPS) {
    const n = Math.min(depth, levels)
    x += n * step
    depth -= n
  }
  return x
}

const middle = (index: number) => index * ROW + ROW / 2

/** The lines of some rows, as the d of an SVG path: what each hangs from, and on to its next sibling. */
export function branchLines(outline: Outline, from: number, to: number): string {
  const { rows } = outline
  const parts: string[] = []
  const hangs = (at: number) => {
    const { depth, next } = rows[at]!
    return next >= 0 && (depth - 1 < STEPS[0]![0] || next - at <= NEAR)
  }
  // Lines that start above the first row and continue below it.
  for (let at = from; at >= 0; at = rows[at]!.above) {
    const row = rows[at]
    if (!row) break
    if (at < from && row.next >= from && hangs(at))
      parts.push(verticalLine(row.depth - 1, at, Math.min(row.next, to)))
  }
  for (let at = from; at < Math.min(to, rows.length); at++) {
    const row = rows[at]!
    if (row.above < 0) continue
    parts.push(cornerLine(row.depth, at))
    if (row.at === 1) parts.push(verticalLine(row.depth - 1, row.above, at))
    if (hangs(at)) parts.push(verticalLine(row.depth - 1, at, Math.min(row.next, to)))
  }
  return parts.join('')
}

/** The thread, without a break from the first row to the last of a path. */
export function pathLine(outline: Outline, path: readonly number[]): string {
  const { rows } = outline
  let d = ''
  path.forEach((index, i) => {
    const row = rows[index]!
    if (i === 0) {
      d = `M${indent(row.depth)} ${middle(index)}`
      return
    }
    const from = indent(row.depth - 1)
    const corner = Math.min(CORNER, indent(row.depth) - from)
    const y = middle(index)
    d += `V${y - corner}Q${from} ${y} ${from + corner} ${y}H${indent(row.depth)}`
  })
  return d
}

function cornerLine(depth: number, index: number): string {
  const [from, to] = [indent(depth - 1), indent(depth)]
  const corner = Math.min(CORNER, to - from)
  const y = middle(index)
  return `M${from} ${y - corner}Q${from} ${y} ${from + corner} ${y}H${to}`
}

/** A line at a level, from the middle of a row to where the corner of another begins. */
function verticalLine(level: number, from: number, to: number): string {
  const corner = Math.min(CORNER, indent(level + 1) - indent(level))
  return `M${indent(level)} ${middle(from)}V${middle(to) - corner}`
}
