/** Undo and redo. */
import { ApiError, api, type Changed } from '../../api/client'
import { nextOperations } from '../../model/operation'
import { plural } from '../../model/words'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { dismiss, sentence, toast } from '../toasts'
import { enqueue, withLoom } from './change'

/** Show the effect of a change, and offer Undo until the next change. */
export function undoable(text: string, rev: number): void {
  toast(text, { action: { label: 'Undo', key: 'u', run: () => void undo() }, undoes: rev })
}

export const undo = () => stepThrough('Undid', (loom) => api.undo(loom.id))

export const redo = () => stepThrough('Redid', (loom) => api.redo(loom.id))

/** Undo or redo an operation, and name it in a toast: its nodes may be out of view. */
async function stepThrough(
  verb: 'Undid' | 'Redid',
  call: (loom: OpenLoom) => Promise<Changed>,
): Promise<Changed | undefined> {
  const result = await withLoom(async (loom) => {
    try {
      const changed = await enqueue(() => call(loom))
      loom.sync.applyReply(changed)
      return changed
    } catch (error) {
      if (!(error instanceof ApiError && error.code.startsWith('cannot_'))) throw error
      showStep(`${sentence(error.message)}.`, sentence(error.hint)) // nothing went wrong
      return undefined
    }
  })
  if (result) showStep(`${verb}: ${await operation(verb, result)}.`)
  return result
}

/** Name the operation that was undone or redone. */
async function operation(verb: 'Undid' | 'Redid', changed: Changed): Promise<string> {
  const loom = open.peek()
  try {
    const { undo, redo } = nextOperations((await api.history(loom!.id)).data)
    return (verb === 'Undid' ? redo : undo) ?? effectText(changed)
  } catch {
    return effectText(changed)
  }
}

let lastToast = 0

/** Several quick steps share one toast: the last one's. */
function showStep(text: string, detail = ''): void {
  dismiss(lastToast)
  lastToast = toast(text, { detail })
}

function effectText({ added = [], removed = [], changed = [] }: Changed): string {
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
