/** The memory that sharing saves, in the words of the status bar and the gauge. */
export interface Kv {
  kv_bytes: number
  kv_bytes_unshared: number
  kv_budget_bytes: number | null
  reused: number
  prefilled: number
  saved_s: number | null
}

/** How many times as much caches of their own would take; null before anything is shared. */
export function timesShared(kv: Kv): number | null {
  if (!kv.kv_bytes || kv.kv_bytes_unshared < 1.05 * kv.kv_bytes) return null
  return kv.kv_bytes_unshared / kv.kv_bytes
}

/** The share of tokens that were there when they were needed, 0 to 1; null before there are any. */
export function shareReused(kv: Kv): number | null {
  const read = kv.reused + kv.prefilled
  return read ? kv.reused / read : null
}

/** 99 %, and never 100 % while anything was computed. */
export function percent(share: number): string {
  const rounded = Math.round(100 * share)
  return `${rounded === 100 && share < 1 ? 99 : rounded}\u202f%`
}
