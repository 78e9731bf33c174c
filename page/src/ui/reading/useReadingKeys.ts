/** What keys do in the text: they move the token cursor, edit, write, split and cut. */
import { useEffect } from 'preact/hooks'
import { ROOT } from '../../model/tree'
import { shownText } from '../../model/turns'
import { moves } from '../../state/actions'
import { handlers } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { card, cursor, showsSpecial } from '../../state/reading'
import { isReadOnly } from '../../state/session'
import { toast } from '../../state/toasts'
import { zone } from '../../state/view'
import { showRemoval } from './motion'
import { choose, clipAt, splitAt, take, walk } from './tokens'

export function useReadingKeys(loom: OpenLoom): void {
  useEffect(() => {
    handlers.edit = () => beginEdit(loom)
    handlers.writeChild = () => beginChild(loom)
    handlers.splitHere = (andChild) => void splitAt(loom, cursor.peek(), andChild)
    handlers.clipHere = (drops) => void clipAt(loom, cursor.peek(), drops ? 'drop' : 'keep')
    handlers.alternative = (by) => void walk(loom, by)
    handlers.takeAlternative = () => {
      if (card.peek()?.by !== 'keys') return false
      void take(loom, true)
      return true
    }
    moves.removing = (tops) => {
      for (const each of tops.slice(0, 4)) {
        const element =
          document.querySelector(`.path [data-node="${each}"]`) ??
          document.querySelector(`.reading [data-child="${each}"] :is(.child-text, .lane-text)`) ??
          document.querySelector(`.reading [data-lane="${each}"] .lane-text`)
        if (element) showRemoval(element)
      }
    }
    const onKey = (event: KeyboardEvent) => onCardKey(loom, event)
    addEventListener('keydown', onKey, { capture: true })
    return () => removeEventListener('keydown', onKey, { capture: true })
  }, [loom])
}

/** Keys of an open card go before all others. */
function onCardKey(loom: OpenLoom, event: KeyboardEvent): void {
  const spot = card.peek()
  if (!spot || zone.peek() === 'text') return
  const isKeys = spot.by === 'keys'
  if (event.key === 'Escape') card.value = null
  else if (isKeys && event.key === 'ArrowDown' && !event.altKey) void choose(loom, 1)
  else if (isKeys && event.key === 'ArrowUp' && !event.altKey) void choose(loom, -1)
  else if (isKeys && event.key === 'Enter' && event.altKey) void take(loom, false)
  else {
    if (/^Arrow(Left|Right)$/.test(event.key)) card.value = null
    return
  }
  event.preventDefault()
  event.stopPropagation()
}

const canWrite = (): boolean => {
  if (!isReadOnly.peek()) return true
  toast('Read-only: its model is not loaded.')
  return false
}

/** Over the node of the cursor, else the current one. */
function beginEdit(loom: OpenLoom): void {
  if (!canWrite()) return
  const at = cursor.peek()?.node
  const number = at !== undefined && loom.tree.isBelow(loom.current.peek(), at) ? at : loom.current.peek()
  const node = loom.tree.get(number)
  if (!node) return
  if (node.growing) return void toast('It grows still: stop it, or wait, to edit it.')
  const info = loom.info.peek()
  const isMessage =
    !showsSpecial.peek() &&
    (number === ROOT ? shownText(node, info, false) === info.prompt : node.said != null)
  card.value = null
  loom.drafts.begin({
    kind: 'edit',
    node: number,
    base: shownText(node, info, showsSpecial.peek()),
    rev: loom.tree.rev,
    isMessage,
  })
}

/** Below the current node. In a chat it is what the user says next, unless it is the model's turn. */
function beginChild(loom: OpenLoom): void {
  if (!canWrite()) return
  const number = loom.current.peek()
  const node = loom.tree.get(number)
  if (!node) return
  if (node.growing) return void toast('It grows still: stop it, or wait, to write below it.')
  const isChat = loom.info.peek().chat_template_used === true
  const isAnswer = number !== ROOT && node.said == null
  loom.drafts.begin({
    kind: 'child',
    node: number,
    base: '',
    rev: loom.tree.rev,
    isMessage: isChat && isAnswer,
  })
}
