/** Bookmark, rate, annotate, regenerate, cache and copy a node. */
import { api, type KvOp } from '../../api/client'
import { comparison, defaultsFor, repeatRequest } from '../../model/provenance'
import { changedRating, MAX_RATING } from '../../model/sibling_order'
import { ROOT } from '../../model/tree'
import { oneLine, plural, shortName, titleOf } from '../../model/words'
import { kvChanged } from '../kvUsage'
import { linkTo, listLooms, model, models } from '../session'
import { dismiss, toast } from '../toasts'
import { change, withLoom } from './change'
import { remove } from './remove'

export const bookmark = (node: number, label?: string | null) =>
  change((loom) => {
    const has = loom.tree.get(node)?.bookmark != null
    return api.edit(loom.id, node, { bookmark: label === undefined ? (has ? null : '') : label })
  })

/** Rate a node; null removes the rating. Ratings rank the siblings of the pairs export. */
export const rate = (node: number, rating: number | null) =>
  change((loom) => api.edit(loom.id, node, { rating }))

let _ratingToast = 0

/** Raise or lower the rating of a node by one, and show the new rating. */
export async function rerate(node: number, by: 1 | -1): Promise<void> {
  let rating: number | null = null
  const changed = await change((loom) => {
    rating = changedRating(loom.tree.get(node)?.rating, by)
    return api.edit(loom.id, node, { rating })
  })
  if (!changed) return
  dismiss(_ratingToast)
  _ratingToast = toast(rating === null ? 'The rating is removed.' : `Rated ${rating} of ${MAX_RATING}.`)
}

/** Grow a node again by what it was grown with, and say whether the same came. */
export const regenerate = (number: number) =>
  withLoom(async (loom) => {
    const node = await api.node(loom.id, number, ['params', 'tokens'])
    const grower = models.peek().find((each) => each.id === node.model) ?? model.peek()
    const defaults = defaultsFor(grower, loom.info.peek().chat_template_used)
    const request = repeatRequest(node, defaults)
    if (typeof request === 'string' || node.parent === null) {
      toast('This node cannot be regenerated.', { detail: typeof request === 'string' ? request : '' })
      return
    }
    const force = loom.tree.get(node.parent)?.ended ?? false
    const reply = await api.growAndWait(loom.id, node.parent, { ...request, force })
    const [twin] = reply.nodes ?? []
    if (!twin) return
    if (!loom.tree.get(twin.node)) await loom.sync.refresh() // the reply may arrive before the event
    const came = comparison(node.token_ids ?? [], twin.token_ids ?? [])
    const n = plural(node.n_tokens, 'token')
    const message = {
      same: `Regenerated the same ${n}.`,
      longer: `The text has the same ${n}, and more after them.`,
      other: 'Regenerated a different text.',
    }[came]
    toast(message, {
      detail:
        came === 'other'
          ? 'The path, the text or the model has changed since, or rounding has changed a token.'
          : '',
      action: { label: 'Remove the copy', run: () => void remove(twin.node) },
    })
  })

/** Save a person's note on a node; its other notes do not change. */
export const note = (number: number, text: string) =>
  change(async (loom) => {
    const { meta } = await api.node(loom.id, number, ['meta'])
    const { note: _, ...rest } = meta ?? {}
    return api.edit(loom.id, number, { meta: text ? { ...rest, note: text } : rest })
  })

/** Compute the KV of a node's path now, keep it, move it, or forget that of its own tokens. */
export const handleKv = (number: number, op: KvOp) =>
  withLoom(async (loom) => {
    const reply = await api.nodeKv(loom.id, number, op)
    kvChanged()
    return reply
  })

/** Pin a node in memory, or unpin it where it is pinned. */
export const pin = (number: number) =>
  withLoom(async (loom) => {
    const isPinned = (await api.node(loom.id, number, ['kv'])).kv?.pinned ?? false
    if (!(await handleKv(number, isPinned ? 'unpin' : 'pin'))) return
    const which = number === ROOT ? 'The prompt' : `Node ${number}`
    toast(isPinned ? `${which} is no longer pinned.` : `${which} is pinned: its path stays in memory.`, {
      action: { label: 'Undo', run: () => void handleKv(number, isPinned ? 'pin' : 'unpin') },
    })
  })

/** Copy all branches of the open loom into a new loom of another model, and open it. */
export const copyFor = (id: string) =>
  withLoom(async (loom) => {
    const title = `${oneLine(titleOf(loom.info.peek()), 120)} (${oneLine(shortName(id), 60)})`
    const copy = await api.copyToLoom(loom.id, ROOT, { title, model: id })
    await listLooms()
    location.hash = linkTo(copy.name)
  })

/** Copy a node and all below it into a new loom, whose prompt is the path to it. */
export const copyOut = (number: number, title: string) =>
  withLoom(async (loom) => {
    const copy = await api.copyToLoom(loom.id, number, { title })
    await listLooms()
    const run = () => {
      location.hash = linkTo(copy.name)
    }
    toast(`Copied ${plural(copy.n_nodes, 'node')} to ${titleOf(copy)}`, { action: { label: 'Open it', run } })
    return copy
  })
