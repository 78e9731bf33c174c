/** Actions at a token: walk, fork, split, cut. */
import { signal } from '@preact/signals'
import type { TokenCandidate } from '../../api/client'
import { pieceOf, piecesOf } from '../../model/pieces'
import { ROOT } from '../../model/tree'
import { shownText } from '../../model/turns'
import * as act from '../../state/actions'
import { call } from '../../state/handlers'
import type { OpenLoom } from '../../state/loom'
import { card, cursor, scored, showsSpecial, type TokenPosition } from '../../state/reading'
import { failed, toast } from '../../state/toasts'
import { showFork } from './motion'

/** The alternative of the card that Enter chooses; null: none. */
export const chosen = signal<number | null>(null)

/** Actions of keys run in their order, even if tokens arrive late. */
let last: Promise<unknown> = Promise.resolve()
export function enqueue(work: () => unknown): Promise<unknown> {
  last = last.then(work).catch(failed)
  return last
}

let walks = 0
/** A card is about to open: keys that come now are meant for it. */
export const isCursorMoving = (): boolean => walks > 0
export function enqueueCursorMove(loom: OpenLoom, by: 1 | -1): void {
  walks += 1
  void enqueue(() => moveCursor(loom, by)).then(() => {
    walks -= 1
  })
}

/** Tokens of a node that are shown, in their order. */
export async function shownTokens(loom: OpenLoom, number: number): Promise<number[]> {
  const node = loom.tree.get(number)
  if (!node || node.growing) return []
  const pieces = piecesOf(
    await loom.tokens.of(number),
    shownText(node, loom.info.peek(), showsSpecial.peek()),
  )
  return (pieces ?? []).flatMap((each) => Array.from({ length: each.count }, (_, i) => each.first + i))
}

/** The number of characters of a node's text before the end of a token; null: unknown. */
export async function charIndex(loom: OpenLoom, spot: TokenPosition, text: string): Promise<number | null> {
  const tokens = await loom.tokens.of(spot.node).catch(() => null)
  return (tokens && pieceOf(piecesOf(tokens, text) ?? [], spot.token)?.end) ?? null
}

/** Go to the next token of the path, or the one before, and open its card. */
async function moveCursor(loom: OpenLoom, by: 1 | -1): Promise<void> {
  const path = loom.tree.path(loom.current.peek())
  const now = cursor.peek()
  let at = now ? path.indexOf(now.node) : path.length - 1
  let token = now?.token ?? null
  for (; at >= 0 && at < path.length; at += by) {
    const number = path[at]!
    const shown = await shownTokens(loom, number).catch(() => [])
    const next =
      token === null
        ? shown[by > 0 ? 0 : shown.length - 1]
        : shown[shown.findIndex((each) => each >= token!) + by]
    if (next !== undefined) {
      setCursor({ node: number, token: next }, 'keys')
      return
    }
    token = null
  }
}

export function setCursor(spot: TokenPosition, by: 'pointer' | 'keys' | null): void {
  cursor.value = spot
  if (by) openCard(spot, by)
}

export function openCard(spot: TokenPosition, by: 'pointer' | 'keys'): void {
  chosen.value = null
  card.value = { ...spot, by }
}

/** Choose another alternative in the card, past the token itself. */
export async function choose(loom: OpenLoom, by: 1 | -1): Promise<void> {
  const spot = card.peek()
  const detailed = spot && (await loom.tokens.at(spot.node, spot.token).catch(() => undefined))
  const top = detailed?.top ?? []
  let at = chosen.peek() ?? (by > 0 ? -1 : top.length)
  do at += by
  while (top[at]?.id === detailed?.id && at >= 0 && at < top.length)
  if (at >= 0 && at < top.length) chosen.value = at
}

/** Take what was chosen in the card, or without a choice the likeliest other token. */
export async function take(loom: OpenLoom, continues: boolean): Promise<void> {
  const spot = card.peek()
  if (!spot) return
  const detailed = await loom.tokens.at(spot.node, spot.token).catch(() => undefined)
  const others = (detailed?.top ?? []).filter((each) => each.id !== detailed?.id)
  const at = chosen.peek()
  const other = at === null ? others[0] : detailed?.top?.[at]
  if (other) await forkAt(spot, other, continues)
}

/** A sibling that shares all before the token, and has another one there. */
export async function forkAt(spot: TokenPosition, other: TokenCandidate, continues: boolean): Promise<void> {
  if (spot.node === ROOT) {
    toast('The prompt has no siblings: edit it, or write a continuation.')
    return
  }
  card.value = null
  const added = await act.fork(spot.node, spot.token, other.id, false)
  if (added === null) return
  cursor.value = { node: added, token: spot.token }
  // It is of the model's own words: its heat is shown without asking.
  scored.value = new Set([...scored.peek(), added])
  if (continues) void act.growChildren(added, { n: 1 })
  requestAnimationFrame(() => {
    const element = document.querySelector(`.path [data-node="${added}"]`)
    const fullText = element?.textContent ?? ''
    if (element) showFork(element, Math.max(0, fullText.length - other.text.length), fullText.length)
  })
}

/** The end of the text above a cut: after the cursor's token; null without a cursor. */
function cutOf(
  loom: OpenLoom,
  spot: TokenPosition | null,
): { node: number; keep: number; isEnd: boolean } | null {
  const node = spot && loom.tree.get(spot.node)
  if (!spot || !node) return null
  return { node: spot.node, keep: spot.token + 1, isEnd: spot.token + 1 >= node.n_tokens }
}

const POINT_FIRST = 'Click into the text first: it is cut after the token at the cursor.'

export async function splitAt(loom: OpenLoom, spot: TokenPosition | null, andWrite: boolean): Promise<void> {
  const cut = cutOf(loom, spot)
  if (!cut && !andWrite) return void toast(POINT_FIRST)
  card.value = null
  if (cut && !cut.isEnd) {
    if (!(await act.split(cut.node, cut.keep))) return
    loom.navigate(cut.node)
  } else if (!andWrite) {
    return void toast('There is no text after the cursor in this node.')
  } else if (cut) loom.navigate(cut.node)
  if (andWrite) call('writeChild')
}

export async function clipAt(
  loom: OpenLoom,
  spot: TokenPosition | null,
  children: 'keep' | 'drop',
): Promise<void> {
  const cut = cutOf(loom, spot)
  if (!cut) return void toast(POINT_FIRST)
  if (cut.isEnd && children === 'keep') return void toast('There is no text after the cursor in this node.')
  card.value = null
  if (!(await act.clip(cut.node, cut.keep, children))) return
  loom.navigate(cut.node)
}
