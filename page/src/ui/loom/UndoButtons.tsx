/** Undo and Redo; their tooltips name the operation that they would revert. */
import { Redo2, Undo2 } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { api } from '../../api/client'
import { nextOperations } from '../../model/operation'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'

export function UndoButtons({ loom }: { loom: OpenLoom }) {
  const [turns, setTurns] = useState<ReturnType<typeof nextOperations>>({ undo: null, redo: null })
  // Loaded when the pointer or the focus reaches the buttons, not before.
  const ask = () => {
    api.history(loom.id).then(
      (reply) => setTurns(nextOperations(reply.data)),
      () => {}, // a tooltip less
    )
  }
  const label = (verb: string, what: string | null) => (what ? `${verb} ${what}` : verb)
  return (
    <span class="row turns" onPointerEnter={ask} onFocusIn={ask}>
      <IconButton icon={Undo2} label={label('Undo', turns.undo)} command="undo" />
      <IconButton icon={Redo2} label={label('Redo', turns.redo)} command="redo" />
    </span>
  )
}
