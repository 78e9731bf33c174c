/** Signals of the text pane: the token cursor, its card, and how tokens are shown. */
import { signal } from '@preact/signals'
import { isHuman, ROOT } from '../model/tree'
import type { OpenLoom } from './loom'
import { remembered } from './storage'

/** A token of a node on the path. */
export interface TokenPosition {
  node: number
  token: number
}

export const cursor = signal<TokenPosition | null>(null)
/** The token whose card is open, and what opened it. */
export const card = signal<(TokenPosition & { by: 'pointer' | 'keys' }) | null>(null)
/** Written nodes whose tokens the model has scored. */
export const scored = signal<ReadonlySet<number>>(new Set())

/** Heat only below this probability; null: all of it. */
export const threshold = remembered<number | null>('heat.threshold', null)
export const showsSpecial = remembered('specialTokens', false)
export const cardNeedsCtrl = remembered('cardNeedsCtrl', false)

/** Written nodes of the path that the model has not scored. */
export const unscored = (loom: OpenLoom): number[] =>
  loom.tree
    .path(loom.current.value)
    .filter((each) => each === ROOT || isHuman(loom.tree.get(each)!))
    .filter((each) => !scored.value.has(each))

export function scoreAll(loom: OpenLoom): void {
  scored.value = new Set([...scored.peek(), ...unscored(loom)])
}

/** Another loom is open: nothing is pointed at. */
export function resetTokenCursor(): void {
  cursor.value = null
  card.value = null
  scored.value = new Set()
}
