/** Create, rename, annotate, remove and restore looms. */
import { ApiError, api, type GrowRequest, type Loom } from '../../api/client'
import type { AuthorNote } from '../../model/author_note'
import { ROOT } from '../../model/tree'
import { titleOf } from '../../model/words'
import { provide } from '../handlers'
import { linkTo, listLooms, model, open } from '../session'
import { failed, toast } from '../toasts'
import { withLoom } from './change'
import { grow } from './grow'
import { writeMessage } from './write'

/** Make a loom of a prompt, open it, and grow its first branches. */
export async function startLoom(
  prompt: string,
  more: { template: boolean; title?: string; system?: string; model?: string; grow: GrowRequest | null },
): Promise<void> {
  try {
    const system = more.system?.trim() || null
    const meta = system === null ? {} : { system }
    const using = more.model ?? model.peek()?.id ?? null
    const title = more.title?.trim() || null
    const { template } = more
    const created = await api.createLoom({ prompt, title, template, system, meta, model: using })
    location.hash = linkTo(created.name)
    await waitFor(() => open.peek()?.id === created.id && open.peek()!.sync.loading.peek() === null)
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
  if (text) void startLoom(text, { template: false, grow: null })
})

export async function removeLoom(loom: Loom): Promise<void> {
  try {
    await api.removeLoom(loom.id)
    if (open.peek()?.id === loom.id) location.hash = ''
    await listLooms()
    toast(`Removed the loom ${titleOf(loom)}`, {
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

/** Give any loom another title; the server derives its name from it. */
export async function renameLoom(loom: Loom, title: string): Promise<boolean> {
  if (open.peek()?.id === loom.id) return rename(title)
  try {
    await api.editLoom(loom.id, { title })
    await listLooms()
    return true
  } catch (error) {
    failed(error)
    return false
  }
}

export async function rename(title: string): Promise<boolean> {
  const done = await withLoom(async (loom) => {
    loom.info.value = await api.editLoom(loom.id, { title })
    await listLooms()
    return true
  })
  return done ?? false
}

/** Note something on the open loom; other notes stay. */
export const noteLoom = (text: string) =>
  withLoom(async (loom) => {
    const { note: before, ...rest } = loom.info.peek().meta ?? {}
    if (text === (before ?? '')) return
    loom.info.value = await api.editLoom(loom.id, { meta: text ? { ...rest, note: text } : rest })
  })

/** Set the author's note of the open loom, which growth inserts into the context; an empty text removes it. */
export const setAuthorNote = (note: AuthorNote) =>
  withLoom(async (loom) => {
    const { author_note: _, ...rest } = loom.info.peek().meta ?? {}
    const meta = note.text.trim() ? { ...rest, author_note: note } : rest
    loom.info.value = await api.editLoom(loom.id, { meta })
  })

async function waitFor(isSo: () => boolean): Promise<void> {
  for (let i = 0; i < 200 && !isSo(); i++) await new Promise((resolve) => setTimeout(resolve, 25))
  if (!isSo()) throw new ApiError(0, 'unreachable', 'The loom did not open.')
}
