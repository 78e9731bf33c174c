/** The open session: the server, its models, the list of looms, and one loom. */

import { batch, computed, effect, signal } from '@preact/signals'
import { ApiError, api, type Loom, type Model, type Schemas, whenLost } from '../api/client'
import { shortName } from '../model/words'
import { OpenLoom } from './loom'
import { isObject, isString, remembered } from './storage'
import { dismissErrors, failed } from './toasts'
import { overlay } from './view'

export const server = signal<Schemas['ServerObject'] | null>(null)
/** null: not loaded yet. */
export const looms = signal<Loom[] | null>(null)
export const open = signal<OpenLoom | null>(null)
/** The name of a loom that is being opened. */
export const opening = signal<string | null>(null)
/** The loom of the address that cannot be shown, and why. */
export const missing = signal<{ name: string; error: string; wasRemoved: boolean } | null>(null)
/** The server does not answer: looked at once a second until it does. */
export const isAway = signal(false)

export const models = computed<Model[]>(() => server.value?.models ?? [])
/** The id of the model that new looms get; null: the server's default. Remembered. */
export const newLoomModel = remembered<string | null>('newLoomModel', null, (kept) =>
  isString(kept) ? kept : null,
)
/** The model that grows the open loom; null where it is not loaded. */
export const model = computed<Model | null>(() => {
  const wanted = open.value?.info.value.model
  const ready = models.value.filter((each) => each.state === 'ready')
  if (!open.value) {
    const chosen = ready.find((each) => each.id === newLoomModel.value)
    return chosen ?? ready.find((each) => each.is_default) ?? ready[0] ?? null
  }
  return ready.find((each) => each.id === wanted || each.source === wanted) ?? null
})
/** The open loom can be read but not grown: its model is not loaded. */
export const isReadOnly = computed(() => open.value !== null && server.value !== null && model.value === null)
export const GONE = { removed: 'This loom was removed.', unknown: 'This server does not have this loom.' }
/** Why the open loom cannot be grown, in words; null where it can. */
export const cannotGrow = computed(() => {
  const loom = open.value
  if (!loom) return null
  if (loom.gone.value) return GONE[loom.gone.value]
  return isReadOnly.value ? `Read-only: load ${shortName(loom.info.value.model)} to grow.` : null
})
/** A model that is being loaded now. */
export const loadingModel = computed(() => models.value.find((each) => each.state === 'loading') ?? null)

let watching = false

/** Ask for the server's state, and again as long as a model is being loaded or it is away. */
export async function watchServer(): Promise<void> {
  if (watching) return
  watching = true
  try {
    for (;;) {
      try {
        const state = await api.server()
        // Equal states redraw nothing.
        if (JSON.stringify(state) !== JSON.stringify(server.peek())) server.value = state
        if (isAway.peek() || looms.peek() === null) void cameBack()
        isAway.value = false
      } catch (error) {
        if (!(error instanceof ApiError && error.isAway)) throw error
        isAway.value = true
      }
      if (!isAway.value && !loadingModel.value) return
      await new Promise((resolve) => setTimeout(resolve, isAway.value ? 1000 : 400))
    }
  } finally {
    watching = false
  }
}

/** Wait for the state of the server; null: the server does not answer. */
export const waitForServer = (): Promise<Schemas['ServerObject'] | null> =>
  new Promise((resolve) => {
    const stop = effect(() => {
      if (server.value === null && !isAway.value) return
      resolve(server.value)
      queueMicrotask(() => stop())
    })
  })

/** The server's hint says whether it can restore the loom. */
const wasRemoved = (error: ApiError) => error.hint.includes('restore')

/** The server answers, for the first time or again: what was missed meanwhile. */
async function cameBack(): Promise<void> {
  try {
    await listLooms()
    const loom = open.peek()
    if (loom) loom.info.value = await api.loom(loom.id)
    else if (missing.peek()) await followAddress() // it may be here now
  } catch (error) {
    const isGone = error instanceof ApiError && error.status === 404
    if (isGone && open.peek()) open.peek()!.lose(wasRemoved(error) ? 'removed' : 'unknown')
    else failed(error)
  }
}

whenLost(() => void watchServer().catch(failed))
effect(() => {
  if (open.value?.feed?.isConnected.value !== false) return
  // If the server answers, the loom itself may be missing.
  void watchServer().then(() => (isAway.peek() ? undefined : cameBack()), failed)
})

const LOOKS_MS = 5000
const LOOKS_AT_MODELS_MS = 2000

/** Notice changes by others while the tab is visible, and keep the address at the current node. */
export function keepWatch(): void {
  const look = () => {
    if (document.hidden) return
    watchServer().catch(failed)
  }
  document.addEventListener('visibilitychange', () => {
    look()
    if (document.hidden) return
    if (open.peek() === null) listLooms().catch(failed)
    if (open.peek()?.gone.peek()) void reopen()
  })
  effect(() => {
    const listsModels = overlay.value === 'models' || overlay.value === 'grow-with'
    if (listsModels) look()
    const timer = setInterval(look, listsModels ? LOOKS_AT_MODELS_MS : LOOKS_MS)
    return () => clearInterval(timer)
  })
  effect(keepAddress)
}

/** Browsers limit how often a page may change its address. */
const ADDRESS_REST_MS = 100
let lastMove = 0

/** Name the open loom and its current node in the address: after a move at once, after several when they end. */
function keepAddress(): (() => void) | undefined {
  const loom = open.value
  if (!loom) return
  const info = loom.info.value
  const node = loom.current.value
  const rest = Date.now() - lastMove < ADDRESS_REST_MS ? ADDRESS_REST_MS : 0
  lastMove = Date.now()
  const timer = setTimeout(() => {
    // An address without this state is a jump that has not been followed yet.
    if (idHere() === loom.id) setAddress(info, node)
  }, rest)
  return () => clearTimeout(timer)
}

/** A loom that was removed may have been brought back elsewhere. */
async function reopen(): Promise<void> {
  const { id } = open.peek()!
  try {
    await api.loom(id)
  } catch {
    return // it is still gone
  }
  close()
  await openLoom(id)
}

export async function listLooms(): Promise<Loom[]> {
  const page = await api.looms()
  looms.value = page.data
  return page.data
}

/** The address of a loom, and of a node in it. */
export const linkTo = (name: string, node: number | null = null): string =>
  `#${encodeURIComponent(name)}${node === null ? '' : `/${node}`}`

/** Replace the address. The browser's history keeps the loom's id: its name may change before the user returns. */
function setAddress({ id, name }: Loom, node: number): void {
  history.replaceState({ loom: id }, '', linkTo(name, node))
}
function idHere(): string | null {
  const state: unknown = history.state
  return isObject(state) && isString(state['loom']) ? state['loom'] : null
}

export function readLink(hash: string): { name: string; node: number | null } | null {
  const [name, node] = hash.replace(/^#/, '').split('/')
  if (!name) return null
  try {
    return { name: decodeURIComponent(name), node: node && /^\d+$/.test(node) ? Number(node) : null }
  } catch {
    return null
  }
}

let wanted = 0

/** Open a loom by its name or id; what was open is closed. id: of the loom, where the name may be an old one. */
export async function openLoom(
  name: string,
  node: number | null = null,
  id: string | null = null,
): Promise<void> {
  const turn = ++wanted
  const known = open.peek()
  if (known && (known.info.peek().name === name || known.id === name || known.id === id)) {
    missing.value = null
    if (node !== null) await known.visit(node).catch(failed)
    if (turn === wanted) setAddress(known.info.peek(), known.current.peek())
    return
  }
  opening.value = name
  try {
    const info = await (id === null ? api.loom(name) : api.loom(id).catch(() => api.loom(name)))
    if (turn !== wanted) return
    close()
    dismissErrors()
    const loom = new OpenLoom(info, node)
    setAddress(info, loom.current.peek())
    batch(() => {
      open.value = loom
      missing.value = null
    })
    await loom.sync.load()
  } catch (error) {
    if (turn !== wanted) return
    if (error instanceof ApiError && error.isAway) {
      close() // it may have come in part
      await new Promise((resolve) => setTimeout(resolve, 1000))
      if (turn === wanted) await openLoom(name, node, id)
      return
    }
    const missingError = error instanceof ApiError && error.status === 404 ? error : null
    if (!missingError) failed(error)
    batch(() => {
      close()
      missing.value = missingError && {
        name,
        error: missingError.message,
        wasRemoved: wasRemoved(missingError),
      }
    })
  } finally {
    if (turn === wanted) opening.value = null
  }
}

export function close(): void {
  open.peek()?.close()
  open.value = null
}

/** Go to what the address says; without a loom in it, to the last one, or to the beginning. */
export async function followAddress(): Promise<void> {
  const link = readLink(location.hash)
  if (link) await openLoom(link.name, link.node, idHere())
  else {
    wanted++
    batch(() => {
      close()
      missing.value = null
      opening.value = null
    })
  }
}
