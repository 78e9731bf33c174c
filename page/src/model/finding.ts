/** Searching the texts of a loom that are known here: words, patterns, and kinds of nodes. */
import type { Node } from '../api/client'
import { meanP, plainText } from './label'
import { type Span, spansOf } from './spans'
import { isHuman, type LoomTree } from './tree'

export const KINDS = ['bookmarked', 'human', 'model', 'ended', 'unread'] as const
export type Kind = (typeof KINDS)[number]

export interface Query {
  text: string
  isRegex: boolean
  isCase: boolean
  kinds: ReadonlySet<Kind>
  /** Bounds of the mean probability; null: none. */
  low: number | null
  high: number | null
}

export const NOTHING: Query = {
  text: '',
  isRegex: false,
  isCase: false,
  kinds: new Set(),
  low: null,
  high: null,
}

export interface Match {
  node: number
  text: string
  spans: readonly Span[]
}

export interface Texts {
  tree: LoomTree
  top: number
  prompt: string
  isChat: boolean
  isUnread: (node: number) => boolean
}

const MS = 400 // a search for words takes at most so long

export const isEmpty = (query: Query): boolean =>
  query.text === '' && query.kinds.size === 0 && query.low === null && query.high === null

/** The regular expression of a query. Throws a SyntaxError with a message for the user. */
export function pattern(query: Query): RegExp {
  const source = query.isRegex ? query.text : query.text.replace(/[\\^$.*+?()[\]{}|/]/g, '\\$&')
  const flags = query.isCase ? 'gu' : 'giu'
  try {
    return new RegExp(source, flags)
  } catch {
    try {
      return new RegExp(source, flags.replace('u', '')) // some patterns are invalid only with the flag u
    } catch {
      throw new SyntaxError('This regular expression is not complete.')
    }
  }
}

/** A node's text, where a query may be true of it. */
export type Candidate = Pick<Match, 'node' | 'text'>

/** Nodes of the kinds that a query asks for, in the order of the tree. */
export function* candidates(texts: Texts, query: Query): Generator<Candidate> {
  for (const number of texts.tree.preorder(texts.top)) {
    const node = texts.tree.get(number)!
    if (isOfKind(node, query, texts))
      yield { node: number, text: plainText(node, texts.prompt, texts.isChat) }
  }
}

/**
 * Nodes that a query is true of, in the order of the tree. isCut: it took too long, there may be more.
 * NOTE: within one text nothing bounds a regular expression; what people type goes to a worker.
 */
export function find(texts: Texts, query: Query): { matches: Match[]; isCut: boolean } {
  const wanted = pattern(query)
  const matches: Match[] = []
  const until = performance.now() + MS
  for (const candidate of candidates(texts, query)) {
    const spans = query.text ? spansOf(candidate.text, wanted) : []
    if (spans.length || !query.text) matches.push({ ...candidate, spans })
    if (performance.now() > until) return { matches, isCut: true }
  }
  return { matches, isCut: false }
}

function isOfKind(node: Node, query: Query, texts: Texts): boolean {
  for (const kind of query.kinds) {
    if (kind === 'bookmarked' && node.bookmark == null) return false
    if (kind === 'human' && !isHuman(node)) return false
    if (kind === 'model' && (isHuman(node) || node.parent === null)) return false
    if (kind === 'ended' && !node.ended) return false
    if (kind === 'unread' && !texts.isUnread(node.node)) return false
  }
  if (query.low === null && query.high === null) return true
  const p = meanP(node)
  return p !== null && p >= (query.low ?? 0) && p <= (query.high ?? 1)
}

/** Convert the server's spans, in characters, to spans in UTF-16 units. */
export function inUnits(text: string, spans: readonly (readonly number[])[]): Span[] {
  const starts = [0]
  for (const character of text) starts.push(starts[starts.length - 1]! + character.length)
  const unit = (at: number) => starts[Math.min(at, starts.length - 1)]!
  return spans.map(([from = 0, to = 0]) => [unit(from), unit(to)])
}

export interface Piece {
  text: string
  isMarked: boolean
}

/** The text around the first hit, on one line, in marked and unmarked pieces. */
export function snippet(match: Match, before = 24, maxLength = 160): Piece[] {
  const first = match.spans[0]?.[0] ?? 0
  let from = Math.max(0, first - before)
  if (from > 0) {
    const blank = match.text.slice(from, first).search(/\s/)
    if (blank >= 0) from += blank + 1
  }
  const to = Math.min(match.text.length, from + maxLength)
  const pieces: Piece[] = []
  const add = (text: string, isMarked: boolean) => {
    const line = text.replace(/\s+/g, ' ')
    if (line) pieces.push({ text: line, isMarked })
  }
  if (from > 0) add('…', false)
  let at = from
  for (const [start, end] of match.spans) {
    if (start >= to) break
    add(match.text.slice(at, start), false)
    add(match.text.slice(start, Math.min(end, to)), true)
    at = Math.min(end, to)
  }
  add(match.text.slice(at, to), false)
  if (to < match.text.length) add('…', false)
  return pieces
}

/** The hit after or before a place in the order of the tree, around the ends. */
export function nextHit(
  tree: LoomTree,
  matches: readonly Match[],
  current: number,
  by: 1 | -1,
): number | null {
  if (!matches.length) return null
  const here = matches.findIndex((each) => each.node === current)
  if (here >= 0) return matches[(here + by + matches.length) % matches.length]!.node
  const order = new Map([...tree.preorder()].map((each, i) => [each, i]))
  const place = order.get(current) ?? -1
  const places = matches.map((each) => order.get(each.node) ?? -1)
  const next =
    by > 0 ? places.findIndex((each) => each > place) : places.findLastIndex((each) => each < place)
  return matches[next >= 0 ? next : by > 0 ? 0 : matches.length - 1]!.node
}
