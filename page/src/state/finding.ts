/** The search that is open, and what it finds: in this loom at once, in all looms by asking the server. */
import { computed, effect, signal } from '@preact/signals'
import { api } from '../api/client'
import {
  candidates,
  find,
  isEmpty,
  type Match,
  NOTHING,
  nextHit,
  pattern,
  type Query,
  type Texts,
} from '../model/finding'
import { type Answer, PatternSearch } from './pattern'
import { open } from './session'
import { failed } from './toasts'

export const isSearching = signal(false)
export const query = signal<Query>(NOTHING)
export const scope = signal<'loom' | 'all'>('loom')
/** How the hits in this loom are shown. */
export const shape = signal<'tree' | 'list'>('tree')

interface Hits {
  matches: readonly Match[]
  /** Why there are none, or not all. */
  error: string
}
const NONE: Hits = { matches: [], error: '' }

/** The texts of the open loom that are searched; null: there is no query. */
const texts = (): Texts | null => {
  const loom = open.value
  if (!loom || !isSearching.value || scope.value === 'all' || isEmpty(query.value)) return null
  loom.tree.version.value
  const { prompt, chat_template_used } = loom.info.value
  return {
    tree: loom.tree,
    top: loom.top,
    prompt,
    isChat: chat_template_used ?? false,
    isUnread: (node: number) => loom.isUnread(node),
  }
}
const isPattern = () => query.value.isRegex && query.value.text !== ''

/** The hits in the open loom; null: there is no query. The hits of a pattern arrive later, from a worker. */
export const hits = computed<Hits | null>(() => {
  if (isPattern()) return matched.value
  const among = texts()
  if (!among) return null
  const { matches, isCut } = find(among, query.value)
  return { matches, error: isCut ? 'The search took too long; these are the first results.' : '' }
})

/** The last hits of a pattern. */
const matched = signal<Hits | null>(null)
const search = new PatternSearch()
/** The search whose hits are pending, and the direction to navigate once they arrive. */
let awaited: { by: 1 | -1 | null } | null = null
let ofLoom: unknown = null
/** A pattern that took too long is not searched again after every change of the tree. */
let cut: Query | null = null

effect(() => {
  const among = isPattern() ? texts() : null
  if (among?.tree !== ofLoom) matched.value = null
  ofLoom = among?.tree
  awaited = null
  if (query.value !== cut) cut = null
  if (!among) return search.end()
  if (cut) return
  try {
    const wanted = pattern(query.value)
    awaited = { by: null }
    search.ask({ wanted, texts: [...candidates(among, query.value)] }, answered)
  } catch (error) {
    search.end()
    matched.value = { ...NONE, error: (error as Error).message }
  }
})

function answered({ matches, state }: Answer): void {
  const first = matches.length ? '; these are the first results' : ''
  const words = {
    busy: 'Searching',
    done: '',
    cut: `The regular expression takes too long${first}.`,
    failed: 'The search did not start.',
  }
  matched.value = { matches, error: words[state] }
  if (state === 'cut') cut = query.peek()
  if (state === 'busy') return
  const by = awaited?.by
  awaited = null
  if (by) navigateToHit(by)
}

/** Nodes that the tree shows, with those above them; null: all. */
export const onlyHits = computed<ReadonlySet<number> | null>(() =>
  hits.value && shape.value === 'tree' ? new Set(hits.value.matches.map((each) => each.node)) : null,
)

export function change(changes: Partial<Query>): void {
  query.value = { ...query.peek(), ...changes }
}

/** Go to the next hit. false: no search is open. */
export function navigateToHit(by: 1 | -1): boolean {
  const loom = open.peek()
  if (awaited) {
    awaited.by = by
    return true
  }
  const matches = hits.peek()?.matches
  if (!loom || !matches) return false
  const next = nextHit(loom.tree, matches, loom.current.peek(), by)
  if (next !== null) loom.navigate(next)
  return true
}

/** Close the search. false: none was open. */
export function closeSearch(): boolean {
  if (!isSearching.peek()) return false
  isSearching.value = false
  return true
}

// All looms

type Reply = Awaited<ReturnType<typeof api.find>>
export const everywhere = signal<(Reply & { words: string }) | null>(null)
const WAIT_MS = 200
let asking: number | undefined

/** Search all looms for words after a pause in typing. */
export function findEverywhere(words: string): void {
  clearTimeout(asking)
  if (!words.trim()) {
    everywhere.value = null
    return
  }
  asking = window.setTimeout(async () => {
    try {
      const reply = await api.find(words)
      if (words === query.peek().text) everywhere.value = { ...reply, words }
    } catch (error) {
      failed(error)
    }
  }, WAIT_MS)
}
