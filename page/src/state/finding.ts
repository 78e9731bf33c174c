/** The search that is open, and what it finds: in this loom at once, in all looms by asking the server. */
import { computed, signal } from '@preact/signals'
import { api, type Schemas } from '../api/client'
import { type Found, find, isEmpty, NOTHING, nextHit, type Query } from '../model/finding'
import { open } from './session'
import { failed } from './toasts'

export const isSearching = signal(false)
export const query = signal<Query>(NOTHING)
export const scope = signal<'loom' | 'all'>('loom')
/** How the hits in this loom are shown. */
export const shape = signal<'tree' | 'list'>('tree')

interface Hits {
  found: readonly Found[]
  /** Why there are none, or not all. */
  error: string
}
const NONE: Hits = { found: [], error: '' }

/** What is found in the open loom; null while nothing is looked for. */
export const hits = computed<Hits | null>(() => {
  const loom = open.value
  if (!loom || !isSearching.value || scope.value === 'all' || isEmpty(query.value)) return null
  loom.tree.version.value
  const { prompt, chat_template_used } = loom.info.value
  const texts = {
    tree: loom.tree,
    top: loom.top,
    prompt,
    isChat: chat_template_used ?? false,
    isUnread: (node: number) => loom.isUnread(node),
  }
  try {
    const { found, isCut } = find(texts, query.value)
    return { found, error: isCut ? 'It took too long: these are the first.' : '' }
  } catch (error) {
    return { ...NONE, error: (error as Error).message }
  }
})

/** Nodes that the tree shows, with those above them; null: all. */
export const onlyHits = computed<ReadonlySet<number> | null>(() =>
  hits.value && shape.value === 'tree' ? new Set(hits.value.found.map((each) => each.node)) : null,
)

export function change(changes: Partial<Query>): void {
  query.value = { ...query.peek(), ...changes }
}

/** Go to the next hit. false: no search is open. */
export function goToHit(by: 1 | -1): boolean {
  const loom = open.peek()
  const found = hits.peek()?.found
  if (!loom || !found) return false
  const next = nextHit(loom.tree, found, loom.current.peek(), by)
  if (next !== null) loom.go(next)
  return true
}

/** Close the search. false: none was open. */
export function closeSearch(): boolean {
  if (!isSearching.peek()) return false
  isSearching.value = false
  return true
}

// All looms

export const everywhere = signal<{ words: string; data: Schemas['HitObject'][]; more: boolean } | null>(null)
const WAIT_MS = 200
let asking: number | undefined

/** Ask for words in all looms, once nobody has typed for a moment. */
export function findEverywhere(words: string): void {
  clearTimeout(asking)
  if (!words.trim()) {
    everywhere.value = null
    return
  }
  asking = window.setTimeout(async () => {
    try {
      const told = await api.find(words)
      if (words === query.peek().text) everywhere.value = { words, data: told.data, more: told.more ?? false }
    } catch (error) {
      failed(error)
    }
  }, WAIT_MS)
}
