/** The keys of the text: move the token cursor, edit, write, split and cut. */
import { useEffect } from 'preact/hooks'
import { ROOT } from '../../model/tree'
import { shownText } from '../../model/turns'
import { provideAll } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { card, cursor } from '../../state/reading'
import { isReadOnly } from '../../state/session'
import { toast } from '../../state/toasts'
import { zone } from '../../state/view'
import { seizeRemoval } from './motion'
import { choose, clipAt, enqueue, enqueueCursorMove, isCursorMoving, splitAt, take } from './tokens'

export function useReadingKeys(loom: OpenLoom): void {
  useEffect(() => {
    const undo = provideAll({
      edit: (inPlace) => beginEdit(loom, inPlace),
      writeChild: () => beginChild(loom),
      splitHere: (andChild) => void enqueue(() => splitAt(loom, cursor.peek(), andChild)),
      clipHere: (drops) => void enqueue(() => clipAt(loom, cursor.peek(), drops ? 'drop' : 'keep')),
      alternative: (by) => enqueueCursorMove(loom, by),
      takeAlternative: () => {
        if (!hasCard()) return false
        void enqueue(() => take(loom, true))
        return true
      },
      removing: (tops) => {
        const folds = tops.slice(0, 4).flatMap((each) => {
          const element =
            document.querySelector(`.path [data-node="${each}"]`) ??
            document.querySelector(`.reading [data-child="${each}"] :is(.child-text, .lane-text)`)
          return element ? [seizeRemoval(element)] : []
        })
        return () => {
          for (const fold of folds) fold()
        }
      },
    })
    const onKey = (event: KeyboardEvent) => onCardKey(loom, event)
    addEventListener('keydown', onKey, { capture: true })
    return () => {
      undo()
      removeEventListener('keydown', onKey, { capture: true })
    }
  }, [loom])
}

/** A card that keys have opened, or are about to. */
const hasCard = () => card.peek()?.by === 'keys' || isCursorMoving()

/** Keys of an open card go before all others. */
function onCardKey(loom: OpenLoom, event: KeyboardEvent): void {
  if (zone.peek() === 'text' || !(card.peek() || isCursorMoving())) return
  const close = () => {
    card.value = null
  }
  if (event.key === 'Escape') void enqueue(close)
  else if (hasCard() && event.key === 'ArrowDown' && !event.altKey) void enqueue(() => choose(loom, 1))
  else if (hasCard() && event.key === 'ArrowUp' && !event.altKey) void enqueue(() => choose(loom, -1))
  else if (hasCard() && event.key === 'Enter' && event.altKey) void enqueue(() => take(loom, false))
  else {
    if (/^Arrow(Left|Right)$/.test(event.key)) close()
    return
  }
  event.preventDefault()
  event.stopPropagation()
}

const canWrite = (): boolean => {
  if (!isReadOnly.peek()) return true
  toast('Read-only: the loom’s model is not loaded.')
  return false
}

/** Over the node of the cursor, else the current one. */
function beginEdit(loom: OpenLoom, inPlace: boolean): void {
  if (!canWrite()) return
  const at = cursor.peek()?.node
  const number = at !== undefined && loom.tree.isBelow(loom.current.peek(), at) ? at : loom.current.peek()
  const node = loom.tree.get(number)
  if (!node) return
  if (node.growing) return void toast('The node is still growing: stop it, or wait, to edit it.')
  const info = loom.info.peek()
  // A message is edited without its template.
  const base = shownText(node, info, false)
  const isMessage = number === ROOT ? base === info.prompt : node.said != null
  card.value = null
  loom.drafts.begin({
    kind: 'edit',
    node: number,
    base,
    rev: loom.tree.rev,
    isMessage,
    inPlace,
  })
}

/** Below the current node. In a chat it is what the user says next, unless it is the model's turn. */
function beginChild(loom: OpenLoom): void {
  if (!canWrite()) return
  const number = loom.current.peek()
  const node = loom.tree.get(number)
  if (!node) return
  const isAnswer = number !== ROOT && node.said == null
  const isMessage = loom.isChat && isAnswer
  // The next message can be written while the answer grows, but is sent after it.
  if (node.growing && !isMessage)
    return void toast('The node is still growing: stop it, or wait, to write below it.')
  loom.drafts.begin({ kind: 'child', node: number, base: '', rev: loom.tree.rev, isMessage, inPlace: false })
}
