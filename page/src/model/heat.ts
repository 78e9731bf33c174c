/** How a token is tinted: likely text is blank paper, unlikely warms. */
export const HEAT_MODES = ['off', 'probability', 'entropy', 'rank'] as const
export type HeatMode = (typeof HEAT_MODES)[number]

export interface Measured {
  logprob: number | null
  entropy: number | null
  rank: number | null
}

/** Bounds of the five tints, from the faintest; below or above each the next begins. */
export const BOUNDS = {
  probability: [0.6, 0.35, 0.15, 0.05, 0.01],
  entropy: [1, 2, 3, 4, 5], // nats
  rank: [1, 3, 10, 30, 100], // 0 is the likeliest
} as const

/** The tint of a token: 0 is none, 5 the strongest; null where it was not measured. */
export function heat(mode: HeatMode, token: Measured): number | null {
  if (mode === 'off') return 0
  if (mode === 'probability') {
    if (token.logprob === null) return null
    const p = Math.exp(token.logprob)
    return BOUNDS.probability.filter((bound) => p < bound).length
  }
  const value = mode === 'entropy' ? token.entropy : token.rank
  if (value === null) return null
  return BOUNDS[mode].filter((bound) => value >= bound).length
}

/** Numbers that JSON does not have come as texts. */
export function parseNumber(value: number | string | null | undefined): number | null {
  if (value === null || value === undefined) return null
  if (typeof value === 'number') return value
  return value === 'inf' ? Infinity : value === '-inf' ? -Infinity : null
}
