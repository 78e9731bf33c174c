/** The pointer in the text: a click sets the cursor, a double click navigates, hovering opens the card. */
import type { RefObject } from 'preact'
import { useEffect } from 'preact/hooks'
import { pieceAt, piecesOf } from '../../model/pieces'
import { shownText } from '../../model/turns'
import type { OpenLoom } from '../../state/loom'
import { card, cardNeedsCtrl, cursor, showsSpecial, type TokenPosition } from '../../state/reading'
import { boxesOf, charAt, isOn, nodeAround, rangeOf } from './textPosition'
import { openCard, setCursor } from './tokens'

const REST_MS = 300
const LEAVE_MS = 250

export function usePointing(loom: OpenLoom, text: RefObject<HTMLElement>): void {
  useEffect(() => {
    const element = text.current
    if (!element) return
    const stops = [clicks(loom, element), hovers(loom, element), copies(element)]
    return () => {
      for (const stop of stops) stop()
    }
  }, [loom])
}

function clicks(loom: OpenLoom, element: HTMLElement): () => void {
  const jump = (event: MouseEvent) => {
    const number = Number(nodeAround(event.target as Node)?.dataset['node'] ?? Number.NaN)
    if (Number.isNaN(number)) return
    getSelection()?.removeAllRanges()
    loom.navigate(number)
  }
  const onClick = (event: MouseEvent) => {
    if (event.shiftKey) return jump(event)
    if (event.detail > 1 || getSelection()?.toString()) return
    // A finger cannot rest: it opens the card at once.
    const by = (event as PointerEvent).pointerType === 'touch' ? 'pointer' : null
    void spotAt(loom, event.clientX, event.clientY).then((spot) => spot && setCursor(spot, by))
  }
  // Shift and a click would select up to there.
  const onDown = (event: MouseEvent) =>
    event.shiftKey && nodeAround(event.target as Node) && event.preventDefault()
  element.addEventListener('mousedown', onDown)
  element.addEventListener('click', onClick)
  element.addEventListener('dblclick', jump)
  return () => {
    element.removeEventListener('mousedown', onDown)
    element.removeEventListener('click', onClick)
    element.removeEventListener('dblclick', jump)
  }
}

/** Segments of a text are copied as the one text that they are. */
function copies(element: HTMLElement): () => void {
  const onCopy = (event: ClipboardEvent) => {
    const selection = getSelection()
    if (!selection?.rangeCount || isTypingIn(event.target)) return
    const range = selection.getRangeAt(0)
    const turns = [...element.querySelectorAll('.turn')].filter((each) => range.intersectsNode(each))
    if (!turns.length) return
    const texts = turns.map((turn) => {
      const part = range.cloneRange()
      const fullRange = document.createRange()
      fullRange.selectNodeContents(turn)
      if (part.compareBoundaryPoints(Range.START_TO_START, fullRange) < 0)
        part.setStart(fullRange.startContainer, fullRange.startOffset)
      if (part.compareBoundaryPoints(Range.END_TO_END, fullRange) > 0)
        part.setEnd(fullRange.endContainer, fullRange.endOffset)
      return part.toString()
    })
    event.clipboardData?.setData('text/plain', texts.join('\n\n'))
    event.preventDefault()
  }
  element.addEventListener('copy', onCopy)
  return () => element.removeEventListener('copy', onCopy)
}

const isTypingIn = (target: EventTarget | null) =>
  target instanceof Element && target.matches('textarea, input')

/** The card opens where the pointer rests, and goes when it has left token and card. */
function hovers(loom: OpenLoom, element: HTMLElement): () => void {
  let resting: number | undefined
  let leaving: number | undefined
  let last = { x: 0, y: 0 }
  const close = () => {
    if (card.peek()?.by === 'pointer') card.value = null
  }
  const show = async () => {
    const spot = await spotAt(loom, last.x, last.y)
    if (spot) openCard(spot, 'pointer')
    else close()
  }
  const onMove = (event: PointerEvent) => {
    if (event.pointerType === 'touch') return
    clearTimeout(resting)
    if (event.target instanceof Element && event.target.closest('.token-card')) {
      clearTimeout(leaving)
      leaving = undefined
      return
    }
    last = { x: event.clientX, y: event.clientY }
    const isText = element.contains(event.target as Node) && nodeAround(event.target as Node) !== null
    if (card.peek()?.by === 'pointer')
      leaving ??= window.setTimeout(() => {
        leaving = undefined
        if (!isText) close()
      }, LEAVE_MS)
    if (!isText || event.buttons || (cardNeedsCtrl.peek() && !event.ctrlKey)) return
    resting = window.setTimeout(() => void show(), REST_MS)
  }
  const onScroll = () => {
    clearTimeout(resting)
    close()
  }
  const onDown = (event: PointerEvent) => {
    if (!(event.target instanceof Element && event.target.closest('.token-card'))) close()
  }
  const pane = element.closest('.reading')
  addEventListener('pointermove', onMove)
  addEventListener('pointerdown', onDown)
  pane?.addEventListener('scroll', onScroll, { passive: true })
  return () => {
    clearTimeout(resting)
    clearTimeout(leaving)
    removeEventListener('pointermove', onMove)
    removeEventListener('pointerdown', onDown)
    pane?.removeEventListener('scroll', onScroll)
  }
}

/** The token under a point; null outside the text, and where tokens are unknown. */
async function spotAt(loom: OpenLoom, x: number, y: number): Promise<TokenPosition | null> {
  const caret = charAt(x, y)
  const number = Number(caret?.element.dataset['node'])
  const node = loom.tree.get(number)
  if (!caret || !node || node.growing) return null
  const tokens = await loom.tokens.of(number).catch(() => null)
  const shown = shownText(node, loom.info.peek(), showsSpecial.peek())
  const pieces = tokens && piecesOf(tokens, shown)
  if (!pieces?.length) return null
  // A caret is between two characters: the point is on the one before it or after it.
  for (const offset of [caret.offset, caret.offset - 1]) {
    const piece = offset < 0 ? undefined : pieceAt(pieces, offset)
    if (piece && isOn(boxesOf(rangeOf(caret.element, piece.start, piece.end)), x, y))
      return { node: number, token: piece.first }
  }
  return null
}

/** One has gone to a node: the cursor stays where it is in that one only, as keys mean the node now. */
export function forgetLost(loom: OpenLoom): void {
  const current = loom.current.peek()
  if (cursor.peek()?.node !== current) cursor.value = null
  if (card.peek()?.node !== current) card.value = null
}
