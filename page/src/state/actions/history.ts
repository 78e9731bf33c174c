/** Undo and redo. */
import { ApiError, api, type Changed } from '../../api/client'
import { next } from '../../model/operation'
import { plural } from '../../model/words'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { dismiss, sentence, toast } from '../toasts'
import { inTurn, on } from './change'

/** Tell what a change has done, and offer to take it back as long as it is the last one. */
export function undoable(text: string, rev: number): void {
  toast(text, { action: { label: 'Undo', key: 'u', run: () => void undo() }, undoes: rev })
}

export const undo = () => goThrough('Undid', (loom) => api.undo(loom.id))

export const redo = () => goThrough('Redid', (loom) => api.redo(loom.id))

/** Go back or on in what was done, and say what that was: it may be far from where one looks. */
async function goThrough(
  verb: 'Undid' | 'Redid',
  call: (loom: OpenLoom) => Promise<Changed>,
): Promise<Changed | undefined> {
  const made = await on(async (loom) => {
    try {
      const made = await inTurn(() => call(loom))
      loom.sync.applyReply(made)
      return made
    } catch (error) {
      if (!(error instanceof ApiError && error.code.startsWith('cannot_'))) throw error
      sayTurn(`${sentence(error.message)}.`, sentence(error.hint)) // nothing went wrong
      return undefined
    }
  })
  if (made) sayTurn(`${verb}: ${await operation(verb, made)}.`)
  return made
}

/** Name the operation that was undone or redone. */
async function operation(verb: 'Undid' | 'Redid', made: Changed): Promise<string> {
  const loom = open.peek()
  try {
    const { undo, redo } = next((await api.history(loom!.id)).data)
    return (verb === 'Undid' ? redo : undo) ?? turned(made)
  } catch {
    return turned(made)
  }
}

let saidTurn = 0

/** Of several steps the last one is told. */
function sayTurn(text: string, detail = ''): void {
  dismiss(saidTurn)
  saidTurn = toast(text, { detail })
}

function turned({ added = [], removed = [], changed = [] }: Changed): string {
  const parts = [
    added.length ? `${plural(added.length, 'node')} ${added.length === 1 ? 'was' : 'were'} restored` : '',
    removed.length
      ? `${plural(removed.length, 'node')} ${removed.length === 1 ? 'was' : 'were'} removed`
      : '',
  ].filter(Boolean)
  if (parts.length) return parts.join(', ')
  const n = changed.length
  return n ? `changes of ${plural(n, 'node')}` : 'a change that is not visible here'
}
