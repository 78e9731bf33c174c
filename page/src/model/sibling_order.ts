/** Orders of siblings, as `weft tree --sort` has them. */
import { parseNumber } from './heat'
import { meanP } from './label'
import type { SortValue } from './tree'

export const ORDERS = {
  grown: 'Original order',
  probability: 'Probability',
  entropy: 'Entropy',
  length: 'Length',
  score: 'Score',
  rating: 'Rating',
} as const
export type Order = keyof typeof ORDERS

const negative = (value: number | null) => (value === null ? null : -value)

/** The value by which siblings are sorted, highest first. A growing node has none, so that rows do not move. */
const VALUES: Record<Exclude<Order, 'grown'>, SortValue> = {
  probability: meanP,
  entropy: (node) => negative(parseNumber(node.mean_entropy)),
  length: (node) => node.n_tokens || node.text.length,
  score: (node) => parseNumber(node.score),
  rating: (node) => node.rating ?? null,
}
const VALUES_OF_COMPLETE = Object.fromEntries(
  Object.entries(VALUES).map(([name, value]): [string, SortValue] => [
    name,
    (node) => (node.growing ? null : value(node)),
  ]),
)

/** Return the value of an order; null: the order of the loom. */
export const sortValue = (order: Order): SortValue | null => VALUES_OF_COMPLETE[order] ?? null

export const MAX_RATING = 5
/** A rating changed by one step: from 1 to the maximum; below 1 there is none. */
export function changedRating(rating: number | null | undefined, by: 1 | -1): number | null {
  const next = Math.min(MAX_RATING, (rating ?? 0) + by)
  return next < 1 ? null : next
}
