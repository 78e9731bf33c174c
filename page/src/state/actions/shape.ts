/** Split, merge, cut and move nodes. */
import { api } from '../../api/client'
import { open } from '../session'
import { change, mustWait } from './change'
import { undoable } from './history'

export const split = (node: number, atToken: number) =>
  change((loom) => api.split(loom.id, node, { at_token: atToken }))

export const merge = (node: number) =>
  mustWait(open.peek()?.growth.growsAt(node), 'to merge it') ??
  change(async (loom) => {
    const parent = loom.tree.parent(node)
    const changed = await api.merge(loom.id, node)
    if (parent !== null && loom.current.peek() === node) loom.current.value = parent
    return changed
  })

/** Cut after so many tokens; what is cut off becomes a child with the children, or is dropped. */
export const clip = (node: number, keep: number, children: 'keep' | 'drop') =>
  change((loom) => api.clip(loom.id, node, { keep, children })).then((changed) => {
    if (changed)
      undoable(children === 'drop' ? 'Cut off' : 'Cut after the cursor. The rest is a child', changed.rev)
    return changed
  })

export const move = (node: number, parent: number, index: number | null = null) =>
  change((loom) => api.move(loom.id, node, { parent, index }))
