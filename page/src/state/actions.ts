/** What a person does to the open loom: each verb once, for keys, buttons and menus alike. */
import { effect, signal, untracked } from '@preact/signals'
import {
  ApiError,
  api,
  type Changed,
  type GrowAsked,
  type KvOp,
  type Loom,
  type RunAsked,
  type Schemas,
} from '../api/client'
import type { AuthorNote } from '../model/author_note'
import type { Lane } from '../model/lane'
import { next } from '../model/operation'
import { againAsked, comparison, defaultsFor } from '../model/provenance'
import { rerated } from '../model/sibling_order'
import { ROOT } from '../model/tree'
import { count, plural, shortName } from '../model/words'
import type { Draft } from './drafts'
import { kvChanged } from './gauge'
import { call, provide } from './handlers'
import { type OpenLoom, without } from './loom'
import { cannotGrow, linkTo, listLooms, model, models, open } from './session'
import { asked, blocked, limits, refused, settings, spent, TO_THE_END } from './settings'
import { dismiss, failed, sentence, toast } from './toasts'
import { troubled } from './trouble'
import { inspect } from './view'

/** Above so many nodes a removal asks before, not after. */
const ASKS_ABOVE = 20

/** Do something to the open loom; what goes wrong is told. Returns undefined then. */
async function on<Result>(
  work: (loom: OpenLoom) => Promise<Result>,
  loom = open.peek(),
): Promise<Result | undefined> {
  if (!loom) return undefined
  try {
    return await work(loom)
  } catch (error) {
    if (!isUnanswered(error)) failed(error)
    return undefined
  }
}

/** Tell that nothing was done because the server does not answer. Returns false for any other error. */
function isUnanswered(error: unknown): boolean {
  if (!(error instanceof ApiError && error.isAway)) return false
  toast('The server does not answer.', { detail: 'Nothing was changed. Try again when the server is back.' })
  return true
}

/**
 * Grow, unless the loom can only be read or a setting is wrong. What stands in the way is told with
 * what helps, what the server refuses beside its setting.
 */
async function growing(
  call: (loom: OpenLoom, more: GrowAsked) => Promise<Schemas['JobReply']>,
  more: GrowAsked,
): Promise<Schemas['JobReply'] | undefined> {
  const loom = open.peek()
  if (!loom) return undefined
  if (cannotGrow.peek()) {
    toast(cannotGrow.peek()!)
    return undefined
  }
  const wrong = blocked.peek()
  if (wrong !== null) {
    inspect('generate')
    toast(wrong, { kind: 'error' })
    return undefined
  }
  try {
    const job = await call(loom, { ...asked(), ...more })
    loom.begin(job.job, job.branches ?? [])
    spent()
    return job
  } catch (error) {
    if (isUnanswered(error)) return undefined
    if (refused(error)) inspect('generate')
    const again = (other: GrowAsked) => open.peek() === loom && growing(call, { ...more, ...other })
    if (!(error instanceof ApiError && troubled(error, again))) failed(error)
    return undefined
  }
}

// What fails while it grows is told as what fails at the call.
effect(() => {
  const failure = open.value?.lastError.value
  if (!failure) return
  const loom = open.peek()!
  const again = async (other: GrowAsked) => {
    const failed = loom.failedLanes().filter((lane) => failure.nodes.includes(lane.parent))
    await loom.replaceLanes(failed, () => growMany(failure.nodes, other))
  }
  untracked(() => troubled(failure.error, again) || failed(failure.error))
})

/** Make a change; it is shown from the call's own answer, before the feed tells it. */
function change(work: (loom: OpenLoom) => Promise<Changed>): Promise<Changed | undefined> {
  return on(async (loom) => {
    const made = await inTurn(() => work(loom))
    loom.apply(made)
    return made
  })
}

let turn: Promise<unknown> = Promise.resolve()
/** One change after the other, as they were asked for: an Undo is of what came before it. */
function inTurn<Made>(call: () => Promise<Made>): Promise<Made> {
  const made = turn.then(call)
  turn = made.catch(() => {})
  return made
}

// Growing

/** What must wait for a branch is told, not asked for. Returns null where nothing must wait. */
function waits(isGrowing: boolean | undefined, what: string): Promise<undefined> | null {
  if (!isGrowing) return null
  toast(`It is still growing: stop it, or wait, ${what}.`)
  return Promise.resolve(undefined)
}

/** Continue a node that has ended: without a minimum most branches would end at once again. */
const pastEnd = (loom: OpenLoom, node: number): GrowAsked =>
  loom.tree.get(node)?.ended ? { force: true, ...(settings.peek().constraint ? {} : { min_tokens: 1 }) } : {}

/** Grow n children of a node. A single answer of a chat is gone to, as it comes. */
export const grow = (node: number, more: GrowAsked = {}) =>
  waits(open.peek()?.tree.get(node)?.growing, 'to grow below it') ?? growAndFollow(node, more)

async function growAndFollow(node: number, more: GrowAsked): Promise<Schemas['JobReply'] | undefined> {
  const loom = open.peek()
  const from = loom?.current.peek()
  const job = await growChildren(node, more)
  const [branch, ...others] = job?.branches ?? []
  if (!loom?.isChat || !branch || others.length || loom.current.peek() !== from) return job
  if (from === node || loom.tree.parent(from!) === node) {
    const draft = loom.drafts.open
    loom.go(branch.node)
    if (draft?.kind === 'child' && draft.node === from) loom.drafts.move(draft, branch.node)
  }
  return job
}

/** Grow one branch until it ends, and show it as it comes. */
export async function continueToEnd(node: number): Promise<void> {
  const loom = open.peek()
  const most = Math.min(TO_THE_END, limits.peek()?.tokens ?? TO_THE_END)
  const job = await grow(node, { n: 1, max_tokens: most })
  const branch = job?.branches?.[0]
  if (branch && loom?.current.peek() === node) loom.go(branch.node)
}

/** Grow n children of a node, and stay where one is. */
export const growChildren = (node: number, more: GrowAsked) =>
  growing(async (loom, what) => {
    loom.asking.value = { parent: node, n: (what.n ?? 1) * (what.models?.length || 1) }
    try {
      return await api.grow(loom.id, node, { ...pastEnd(loom, node), ...what })
    } finally {
      loom.asking.value = null
    }
  }, more)

/** Grow n children of each of several nodes, in one batch. null: of all leaves that have not ended. */
export const growMany = (nodes: number[] | null, more: GrowAsked = {}) =>
  growing((loom, what) => api.growMany(loom.id, { ...what, nodes }), more).then((job) => {
    if (job?.skipped?.length)
      toast(`${plural(job.skipped.length, 'node')} had already ended and did not grow.`)
    return job
  })

/** Search for an answer below a node; its rounds are shown beside the text. Raises: ApiError. */
export async function search(asked: RunAsked): Promise<void> {
  const loom = open.peek()
  if (!loom) return
  const job = await api.run(loom.id, asked)
  loom.begin(job.job, job.branches ?? [], { ...asked })
  inspect('run')
}

/** Grow as many branches as have failed. Nodes that failed branches have left stay in the tree. */
export async function retry(lanes: readonly Lane[]): Promise<void> {
  const loom = open.peek()
  for (const [parent, below] of Map.groupBy(lanes, (lane) => lane.parent))
    for (const [name, failed] of Map.groupBy(below, (lane) => lane.model ?? model.peek()?.id)) {
      const more = { n: failed.length, ...(name === undefined ? {} : { models: [name] }) }
      if (!(await loom?.replaceLanes(failed, () => grow(parent, more)))) return
    }
}

/** End one branch; what it has is kept. */
export const stopBranch = (node: number) =>
  on(async (loom) => {
    const lane = loom.lanes.peek().get(node)
    if (lane && !lane.isOver) await api.cancel(lane.job, [lane.branch])
  })

/** End everything that grows in the open loom. */
export const stopAll = () =>
  on(async (loom) => {
    const jobs = new Set(
      [...loom.lanes.peek().values()].filter((lane) => !lane.isOver).map((lane) => lane.job),
    )
    for (const run of loom.runs.peek()) if (run.status === 'running') jobs.add(run.job)
    await Promise.all([...jobs].map((job) => api.cancel(job)))
  })

// Writing

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
  loom.apply(made)
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

/** Go to the node that a change has added. */
function follow(made: Changed | undefined): number | null {
  const added = made?.added?.[made.added.length - 1]
  if (!added) return null
  open.peek()?.go(added.node)
  return added.node
}

// Shape

export const split = (node: number, atToken: number) =>
  change((loom) => api.split(loom.id, node, { at_token: atToken }))
export const merge = (node: number) =>
  waits(open.peek()?.growsAt(node), 'to merge it') ??
  change(async (loom) => {
    const parent = loom.tree.parent(node)
    const made = await api.merge(loom.id, node)
    if (parent !== null && loom.current.peek() === node) loom.current.value = parent
    return made
  })
/** Cut after so many tokens; what is cut off becomes a child with the children, or is dropped. */
export const clip = (node: number, keep: number, children: 'keep' | 'drop') =>
  change((loom) => api.clip(loom.id, node, { keep, children })).then((made) => {
    if (made)
      undoable(children === 'drop' ? 'Cut off' : 'Cut after the cursor. The rest is a child', made.rev)
    return made
  })
export const move = (node: number, parent: number, index: number | null = null) =>
  change((loom) => api.move(loom.id, node, { parent, index }))

export type What = 'node' | 'children' | 'siblings' | 'others'

/** Numbers that a removal takes, the tops only. */
export function removed(loom: OpenLoom, node: number, what: What): number[] {
  const { tree } = loom
  if (what === 'node') return [node]
  if (what === 'children') return tree.children(node)
  if (what === 'siblings') return tree.siblings(node).filter((each) => each !== node)
  const path = new Set(tree.path(node))
  return [...path].flatMap((each) =>
    each === node ? [] : tree.children(each).filter((child) => !path.has(child)),
  )
}

export async function remove(node: number, what: What = 'node'): Promise<void> {
  await on(async (loom) => {
    if (what === 'node' && node === ROOT) {
      toast('The prompt cannot be removed; its loom can.', {
        detail: 'To remove the loom, open Loom and choose “Remove this loom”.',
      })
      return
    }
    const tops = removed(loom, node, what)
    const n = tops.reduce((sum, each) => sum + 1 + loom.tree.below(each), 0)
    if (!n) return
    if (n > ASKS_ABOVE && !(await confirm(`Remove ${count(n)} nodes?`, 'Undo restores them.', 'Remove')))
      return
    await stopped(loom, tops)
    if (!loom.tree.get(node)) return // it had nothing yet
    const next = standsAfter(loom, node, what)
    const fold = call('removing', tops)
    loom.next = next // the feed may tell of it before the answer does
    const made = await taken(loom, () => api.remove(loom.id, node, what), fold)
    if (next !== null) loom.go(next)
    toldRemoved(n, made)
  })
}

/** So many nodes, and what stands below them, are removed by one call. */
export const REMOVED_AT_ONCE = 1000

/** Remove several nodes, as one change that one Undo brings back. */
export async function removeMany(nodes: readonly number[]): Promise<void> {
  await on(async (loom) => {
    const { tree } = loom
    const going = new Set(nodes.filter((each) => each !== ROOT && tree.get(each)))
    const tops = [...going].filter((each) => !tree.path(each).some((up) => up !== each && going.has(up)))
    if (!tops.length) return
    if (tops.length > REMOVED_AT_ONCE) {
      toast(
        `At most ${count(REMOVED_AT_ONCE)} nodes can be removed at once; ${count(tops.length)} are selected.`,
      )
      return
    }
    const n = tops.reduce((sum, each) => sum + 1 + tree.below(each), 0)
    if (n > ASKS_ABOVE && !(await confirm(`Remove ${count(n)} nodes?`, 'Undo restores them.', 'Remove')))
      return
    await stopped(loom, tops)
    const [first, ...others] = tops.filter((each) => tree.get(each))
    if (first === undefined) return // none had anything yet
    const stays = tree
      .path(loom.current.peek())
      .findLast((_, i, path) => path.slice(0, i + 1).every((up) => !going.has(up)))
    const fold = call('removing', tops)
    loom.next = stays ?? null
    const made = await taken(loom, () => api.remove(loom.id, first, 'node', others), fold)
    if (stays !== undefined) loom.go(stays)
    loom.selected.value = new Set()
    toldRemoved(n, made)
  })
}

const STOPS_MS = 2000
/** End what grows in what is about to go: what it has is kept then, and Undo brings it back. */
async function stopped(loom: OpenLoom, tops: readonly number[]): Promise<void> {
  const lanes = [...loom.lanes.peek().values()].filter(
    (lane) => !lane.isOver && tops.some((top) => loom.tree.isBelow(lane.node, top)),
  )
  const byJob = Map.groupBy(lanes, (lane) => lane.job)
  await Promise.all(
    [...byJob].map(([job, ended]) =>
      api.cancel(
        job,
        ended.map((lane) => lane.branch),
      ),
    ),
  )
  // A model in the middle of a long step ends after it; nobody waits for that.
  const until = performance.now() + STOPS_MS
  while (lanes.some((lane) => !lane.isOver) && performance.now() < until)
    await new Promise((resolve) => setTimeout(resolve, 25))
}

function toldRemoved(n: number, made: Changed): void {
  if (made.removed?.length) undoable(`Removed ${plural(n, 'node')}`, made.rev)
  else toast('Stopped and removed the new branches.')
}

/** Make a removal, and show it; the loom's `next` says where one stands then. */
async function taken(loom: OpenLoom, call: () => Promise<Changed>, fold?: () => void): Promise<Changed> {
  try {
    const made = await inTurn(call)
    fold?.()
    loom.apply(made)
    return made
  } finally {
    loom.next = null
  }
}

/** Where to stand once a node has gone: its next sibling, else the one before, else its parent. */
function standsAfter(loom: OpenLoom, node: number, what: What): number | null {
  const current = loom.current.peek()
  if (!removed(loom, node, what).some((each) => loom.tree.isBelow(current, each))) return null
  if (what !== 'node') return node
  const siblings = loom.tree.siblings(node)
  const at = siblings.indexOf(node)
  return siblings[at + 1] ?? siblings[at - 1] ?? loom.tree.parent(node)
}

/** Tell what a change has done, and offer to take it back as long as it is the last one. */
function undoable(text: string, rev: number): void {
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
      loom.apply(made)
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

export const bookmark = (node: number, label?: string | null) =>
  change((loom) => {
    const has = loom.tree.get(node)?.bookmark != null
    return api.edit(loom.id, node, { bookmark: label === undefined ? (has ? null : '') : label })
  })

/** Rate a node; null removes the rating. Ratings rank the siblings of the pairs export. */
export const rate = (node: number, rating: number | null) =>
  change((loom) => api.edit(loom.id, node, { rating }))

/** Raise or lower the rating of a node by one. */
export const rerate = (node: number, by: 1 | -1) =>
  rate(node, rerated(open.peek()?.tree.get(node)?.rating, by))

/** Grow a node again by what it was grown with, and say whether the same came. */
export const regenerate = (number: number) =>
  on(async (loom) => {
    const node = await api.node(loom.id, number, ['params', 'tokens'])
    const grower = models.peek().find((each) => each.id === node.model) ?? model.peek()
    const defaults = defaultsFor(grower, loom.info.peek().chat_template_used)
    const again = againAsked(node, defaults)
    if (typeof again === 'string' || node.parent === null) {
      toast('This node cannot be regenerated.', { detail: typeof again === 'string' ? again : '' })
      return
    }
    const force = loom.tree.get(node.parent)?.ended ?? false
    const told = await api.growWhole(loom.id, node.parent, { ...again, force })
    const [twin] = told.nodes ?? []
    if (!twin) return
    if (!loom.tree.get(twin.node)) await loom.refresh() // the answer may be here before the feed tells of it
    const came = comparison(node.token_ids ?? [], twin.token_ids ?? [])
    const n = plural(node.n_tokens, 'token')
    const says = {
      same: `Regenerated the same ${n}.`,
      longer: `The text has the same ${n}, and more after them.`,
      other: 'Regenerated a different text.',
    }[came]
    toast(says, {
      detail: came === 'other' ? 'Its path, its text or the model has changed since.' : '',
      action: { label: 'Remove the copy', run: () => void remove(twin.node) },
    })
  })

/** What somebody notes on a node; other notes stay. */
export const note = (number: number, text: string) =>
  change(async (loom) => {
    const { meta } = await api.node(loom.id, number, ['meta'])
    const { note: _, ...rest } = meta ?? {}
    return api.edit(loom.id, number, { meta: text ? { ...rest, note: text } : rest })
  })

/** Compute the KV of a node's path now, keep it, move it, or forget that of its own tokens. */
export const handleKv = (number: number, op: KvOp) =>
  on(async (loom) => {
    const told = await api.nodeKv(loom.id, number, op)
    kvChanged()
    return told
  })

/** Pin a node in memory, or unpin it where it is pinned. */
export const pin = (number: number) =>
  on(async (loom) => {
    const isPinned = (await api.node(loom.id, number, ['kv'])).kv?.pinned ?? false
    if (!(await handleKv(number, isPinned ? 'unpin' : 'pin'))) return
    const which = number === ROOT ? 'The prompt' : `Node ${number}`
    toast(isPinned ? `${which} is no longer pinned.` : `${which} is pinned: its path stays in memory.`, {
      action: { label: 'Undo', run: () => void handleKv(number, isPinned ? 'pin' : 'unpin') },
    })
  })

/** Copy all branches of the open loom into a new loom of another model, and open it. */
export const copyFor = (id: string) =>
  on(async (loom) => {
    const taken = new Set((await listLooms()).map((each) => each.name))
    const name = `${loom.info.peek().name}-${shortName(id)}`
    let free = name
    for (let k = 2; taken.has(free); k++) free = `${name}-${k}`
    const made = (await api.copy(loom.id, ROOT, { new_loom: free, model: id })) as unknown as Loom
    await listLooms()
    location.hash = linkTo(made.name)
  })

/** Copy a node and all below it into a new loom, whose prompt is the path to it. */
export const copyOut = (number: number, name: string) =>
  on(async (loom) => {
    const made = (await api.copy(loom.id, number, { new_loom: name })) as unknown as Loom
    await listLooms()
    const run = () => {
      location.hash = linkTo(made.name)
    }
    toast(`Copied ${plural(made.n_nodes, 'node')} to ${made.name}`, { action: { label: 'Open it', run } })
    return made
  })

// Looking

export function hoist(node: number): void {
  const loom = open.peek()
  if (!loom || loom.top === node) return
  loom.hoisted.value = [...loom.hoisted.peek(), node]
  if (!loom.tree.isBelow(loom.current.peek(), node)) loom.current.value = node
  loom.remember()
}

export function unhoist(): void {
  const loom = open.peek()
  if (!loom) return
  loom.hoisted.value = loom.hoisted.peek().slice(0, -1)
  loom.remember()
}

export function collapse(nodes: number[], isCollapsed: boolean): void {
  const loom = open.peek()
  if (!loom) return
  const now = loom.collapsed.peek()
  loom.collapsed.value = isCollapsed ? new Set([...now, ...nodes]) : without(now, nodes)
  loom.remember()
}

// Looms

/** Make a loom of a prompt, open it, and grow its first branches. */
export async function begin(
  prompt: string,
  more: { template: boolean; system?: string; model?: string; grow: GrowAsked | null },
): Promise<void> {
  try {
    const system = more.system?.trim() || null
    const meta = system === null ? {} : { system }
    const using = more.model ?? model.peek()?.id ?? null
    const made = await api.createLoom({ prompt, template: more.template, system, meta, model: using })
    location.hash = linkTo(made.name)
    await waitFor(() => open.peek()?.id === made.id && open.peek()!.loading.peek() === null)
    if (more.grow) await grow(ROOT, more.grow)
    const loom = open.peek()
    if (loom?.isChat && loom.current.peek() !== ROOT) writeMessage(loom, loom.current.peek())
    await listLooms()
  } catch (error) {
    failed(error)
  }
}

// A new loom with this node's text alone: what stood before it takes no context there.
provide('hoistAway', (node) => {
  const text = open.peek()?.tree.get(node)?.text
  if (text) void begin(text, { template: false, grow: null })
})

export async function removeLoom(name: string): Promise<void> {
  try {
    await api.removeLoom(name)
    if (open.peek()?.info.peek().name === name) location.hash = ''
    await listLooms()
    toast(`Removed the loom ${name}`, {
      action: {
        label: 'Undo',
        run: () => {
          api.restoreLooms().then(() => listLooms(), failed)
        },
      },
    })
  } catch (error) {
    failed(error)
  }
}

/** Bring back the looms that were removed last, and open one. */
export async function restore(name: string): Promise<void> {
  try {
    await api.restoreLooms()
    await listLooms()
    location.hash = ''
    location.hash = linkTo(name)
  } catch (error) {
    failed(error)
  }
}

/** Give any loom another name. */
export async function renameLoom(loom: Loom, name: string): Promise<boolean> {
  if (open.peek()?.id === loom.id) return rename(name)
  try {
    await api.editLoom(loom.id, { name })
    await listLooms()
    return true
  } catch (error) {
    failed(error)
    return false
  }
}

export async function rename(name: string): Promise<boolean> {
  const done = await on(async (loom) => {
    loom.info.value = await api.editLoom(loom.id, { name })
    history.replaceState(history.state, '', linkTo(loom.info.peek().name, loom.current.peek()))
    await listLooms()
    return true
  })
  return done ?? false
}

/** Note something on the open loom; other notes stay. */
export const noteLoom = (text: string) =>
  on(async (loom) => {
    const { note: before, ...rest } = loom.info.peek().meta ?? {}
    if (text === (before ?? '')) return
    loom.info.value = await api.editLoom(loom.id, { meta: text ? { ...rest, note: text } : rest })
  })

/** Set the author's note of the open loom, which growth inserts into the context; an empty text removes it. */
export const setAuthorNote = (note: AuthorNote) =>
  on(async (loom) => {
    const { author_note: _, ...rest } = loom.info.peek().meta ?? {}
    const meta = note.text.trim() ? { ...rest, author_note: note } : rest
    loom.info.value = await api.editLoom(loom.id, { meta })
  })

async function waitFor(isSo: () => boolean): Promise<void> {
  for (let i = 0; i < 200 && !isSo(); i++) await new Promise((resolve) => setTimeout(resolve, 25))
  if (!isSo()) throw new ApiError(0, 'unreachable', 'The loom did not open.')
}

// Asking before

export interface Question {
  title: string
  text: string
  yes: string
  answer: (yes: boolean) => void
}
export const question = signal<Question | null>(null)

/** Ask something that cannot be taken back lightly. */
export function confirm(title: string, text: string, yes: string): Promise<boolean> {
  return new Promise((resolve) => {
    question.value = {
      title,
      text,
      yes,
      answer: (said) => {
        question.value = null
        resolve(said)
      },
    }
  })
}
