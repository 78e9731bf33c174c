/** Convert characters to screen positions, and back. */

/** The node's element that something lies in, if it is text of the path. */
export const nodeAround = (at: Node | null): HTMLElement | null =>
  (at instanceof Element ? at : (at?.parentElement ?? null))?.closest<HTMLElement>('[data-node]') ?? null

/**
 * The text position under a point: a node's element and the number of its characters before the point.
 * null in Markdown, which hides characters of the text.
 */
export function charAt(x: number, y: number): { element: HTMLElement; offset: number } | null {
  const caret = caretAt(x, y)
  const element = nodeAround(caret?.node ?? null)
  if (!caret || !element || element.dataset['markdown']) return null
  const range = document.createRange()
  range.setStart(element, 0)
  range.setEnd(caret.node, caret.offset)
  return { element, offset: range.toString().length }
}

function caretAt(x: number, y: number): { node: Node; offset: number } | null {
  if ('caretPositionFromPoint' in document) {
    const caret = document.caretPositionFromPoint(x, y)
    return caret && { node: caret.offsetNode, offset: caret.offset }
  }
  const range = (document as Document).caretRangeFromPoint(x, y)
  return range && { node: range.startContainer, offset: range.startOffset }
}

/** Characters of an element as a range. */
export function rangeOf(element: Element, start: number, end: number): Range {
  const range = document.createRange()
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT)
  let before = 0
  let hasStart = false
  range.selectNodeContents(element)
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const length = (node as Text).length
    if (!hasStart && start <= before + length) {
      range.setStart(node, start - before)
      hasStart = true
    }
    if (end <= before + length) {
      range.setEnd(node, end - before)
      break
    }
    before += length
  }
  return range
}

/** The boxes of a range's lines; none where nothing is drawn. */
export const boxesOf = (range: Range): DOMRect[] => [...range.getClientRects()].filter((each) => each.width)

/** The boxes of a range's lines; of a line's end, which has no width, where it stands. */
export function placesOf(range: Range): DOMRect[] {
  const boxes = boxesOf(range)
  return boxes.length ? boxes : [...range.getClientRects()].slice(0, 1)
}

/** Return true if a point is on one of the lines, not only in their row. */
export const isOn = (boxes: readonly DOMRect[], x: number, y: number): boolean =>
  boxes.some((box) => x >= box.left && x <= box.right && y >= box.top - 4 && y <= box.bottom + 4)
