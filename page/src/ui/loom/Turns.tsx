/** Undo and Redo; their tooltips say what they would turn. */
import { Redo2, Undo2 } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { api } from '../../api/client'
import { next } from '../../model/operation'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'

export function Turns({ loom }: { loom: OpenLoom }) {
  const [turns, setTurns] = useState<ReturnType<typeof next>>({ undo: null, redo: null })
  // Loaded when the pointer or the focus reaches the buttons, not before.
  const ask = () => {
    api.history(loom.id).then(
      (reply) => setTurns(next(reply.data)),
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
