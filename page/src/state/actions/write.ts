/** Add, send, edit and fork text. */
import { api } from '../../api/client'
import { ROOT } from '../../model/tree'
import type { Draft } from '../drafts'
import type { OpenLoom } from '../loom'
import { open } from '../session'
import { settings } from '../settings'
import { change, follow, inTurn } from './change'
import { grow, growChildren } from './grow'

/** Add a child that somebody wrote, and go there. In a chat it is what the user says next. */
export const write = (parent: number, text: string, isMessage = false) =>
  change((loom) => api.add(loom.id, isMessage ? { parent, message: text } : { parent, text })).then(follow)

/**
 * Add what was written in a chat as a message, and grow answers. A single answer is gone to. The field is empty
 * at once and stays open, so that the next message can be written meanwhile.
 */
export async function send(loom: OpenLoom, draft: Draft, n?: number): Promise<void> {
  const { text, node: parent } = draft
  const { drafts } = loom
  drafts.change(draft, { text: '' })
  const made = await change(() => api.add(loom.id, { parent, message: text }))
  const added = made?.added?.at(-1)
  const next = drafts.find('child', parent)
  if (!added) {
    const field = next ?? writeMessage(loom, parent)
    drafts.change(field, { text: field.text ? `${text}\n${field.text}` : text })
    return
  }
  loom.go(added.node)
  // At once, before the field is drawn again and loses the focus.
  if (next && ((n ?? settings.peek().n) === 1 || next.text)) drafts.move(next, added.node)
  else if (next) drafts.drop(next)
  await grow(added.node, n === undefined ? {} : { n })
}

/** Open the field for the next message below a node. */
export const writeMessage = (loom: OpenLoom, node: number) =>
  loom.drafts.begin({ kind: 'child', node, base: '', rev: loom.tree.rev, isMessage: true, inPlace: false })

/** Add a token that somebody chose, and go there. What leads to it is not computed again. */
export const take = (parent: number, tokenIds: number[]) =>
  change((loom) => api.add(loom.id, { parent, token_ids: tokenIds })).then(follow)

/**
 * Change what a node says: as a sibling, or in its place, which needs what is below computed anew.
 * rev: what was known when the writing began. Raises: ApiError; 409 if in place and changed since then.
 */
export async function edit(
  node: number,
  text: string,
  how: { inPlace: boolean; isMessage: boolean; rev: number },
): Promise<void> {
  const loom = open.peek()
  if (!loom) return
  const said = how.isMessage ? { message: text } : { text }
  const made = await inTurn(() =>
    api.edit(loom.id, node, { ...said, in_place: how.inPlace }, how.inPlace ? how.rev : undefined),
  )
  loom.sync.applyReply(made)
  if (node === ROOT && how.inPlace) loom.info.value = await api.loom(loom.id)
  if (!how.inPlace) follow(made)
}

/** A sibling that shares the first tokens and then goes another way; with grow one branch goes on. */
export async function fork(
  node: number,
  atToken: number,
  tokenId: number,
  goesOn: boolean,
): Promise<number | null> {
  const made = follow(
    await change((loom) => api.fork(loom.id, node, { at_token: atToken, token_id: tokenId })),
  )
  if (made !== null && goesOn) await growChildren(made, { n: 1 })
  return made
}
