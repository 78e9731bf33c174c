/** Add, send, edit and fork text. */
import { api } from '../../api/client'
import type { Draft } from '../drafts'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { settings } from '../settings'
import { change, enqueue, navigateToAdded } from './change'
import { grow, growChildren } from './grow'

/** Add a written child, and navigate to it. In a chat it is the user's next message. */
export const write = (parent: number, text: string, isMessage = false) =>
  change((loom) => api.add(loom.id, isMessage ? { parent, message: text } : { parent, text })).then(
    navigateToAdded,
  )

/**
 * Add what was written in a chat as a message, and grow answers. A single answer is gone to. The field is empty
 * at once and stays open, so that the next message can be written meanwhile.
 */
export async function send(loom: OpenLoom, draft: Draft, n?: number): Promise<void> {
  const { text, node: parent } = draft
  const { drafts } = loom
  drafts.change(draft, { text: '' })
  const changed = await change(() => api.add(loom.id, { parent, message: text }))
  const added = changed?.added?.at(-1)
  const next = drafts.find('child', parent)
  if (!added) {
    const field = next ?? writeMessage(loom, parent)
    drafts.change(field, { text: field.text ? `${text}\n${field.text}` : text })
    return
  }
  loom.navigate(added.node)
  // At once, before the field is drawn again and loses the focus.
  if (next && ((n ?? settings.peek().n) === 1 || next.text)) drafts.move(next, added.node)
  else if (next) drafts.drop(next)
  await grow(added.node, n === undefined ? {} : { n })
}

/** Open the field for the next message below a node. */
export const writeMessage = (loom: OpenLoom, node: number) =>
  loom.drafts.begin({ kind: 'child', node, base: '', rev: loom.tree.rev, isMessage: true, inPlace: false })

/** Add a chosen token, and navigate to it. The KV of its path is reused. */
export const take = (parent: number, tokenIds: number[]) =>
  change((loom) => api.add(loom.id, { parent, token_ids: tokenIds })).then(navigateToAdded)

/**
 * Change a node's text in a new sibling or in place; in place, the KV below is recomputed.
 * rev: the revision when the edit began. Raises: ApiError; 409 if in place and changed since then.
 */
export async function edit(
  node: number,
  text: string,
  how: { inPlace: boolean; isMessage: boolean; rev: number },
): Promise<void> {
  const loom = open.peek()
  if (!loom) return
  const body = how.isMessage ? { message: text } : { text }
  const changed = await enqueue(() =>
    api.edit(loom.id, node, { ...body, in_place: how.inPlace }, how.inPlace ? how.rev : undefined),
  )
  loom.sync.applyReply(changed)
  if (!how.inPlace) navigateToAdded(changed)
}

/** A sibling that shares the first tokens and then goes another way; with grow one branch goes on. */
export async function fork(
  node: number,
  atToken: number,
  tokenId: number,
  continues: boolean,
): Promise<number | null> {
  const added = navigateToAdded(
    await change((loom) => api.fork(loom.id, node, { at_token: atToken, token_id: tokenId })),
  )
  if (added !== null && continues) await growChildren(added, { n: 1 })
  return added
}
