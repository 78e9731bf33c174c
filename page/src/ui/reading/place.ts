/** From letters to places on the screen, and back. */

/** The node's element that something lies in, if it is text of the path. */
export const nodeAround = (at: Node | null): HTMLElement | null =>
  (at instanceof Element ? at : (at?.parentElement ?? null))?.closest<HTMLElement>('[data-node]') ?? null

/**
 * The text position under a point: a node's element and how many of its letters stand before. null in Markdown,
 * which leaves out letters of the text.
 */
export function letterAt(x: number, y: number): { element: HTMLElement; offset: number } | null {
  const found = caretAt(x, y)
  const element = nodeAround(found?.node ?? null)
  if (!found || !element || element.dataset['markdown']) return null
  const range = document.createRange()
  range.setStart(element, 0)
  range.setEnd(found.node, found.offset)
  return { element, offset: range.toString().length }
}

function caretAt(x: number, y: number): { node: Node; offset: number } | null {
  if ('caretPositionFromPoint' in document) {
    const found = document.caretPositionFromPoint(x, y)
    return found && { node: found.offsetNode, offset: found.offset }
  }
  const range = (document as Document).caretRangeFromPoint(x, y)
  return range && { node: range.startContainer, offset: range.startOffset }
}

/** Letters of an element as a range. */
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

/** Whether a point lies on one of the lines, not only beside them. */
export const isOn = (boxes: readonly DOMRect[], x: number, y: number): boolean =>
  boxes.some((box) => x >= box.left && x <= box.right && y >= box.top - 4 && y <= box.bottom + 4)
