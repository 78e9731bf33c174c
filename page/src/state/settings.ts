/** How branches are grown: what the person set, for one loom or for all. */
import { computed } from '@preact/signals'
import type { GrowAsked } from '../api/client'
import { remembered } from './kept'
import { open } from './session'

export interface Settings {
  n: number
  max_tokens: number
  temperature: number
  top_p: number
  top_k: number
  min_p: number
  repetition_penalty: number
  stop: string[]
  seed: number | null
}

/** Neutral sampling: what a base model's own distribution says. */
export const NEUTRAL: Settings = {
  n: 4,
  max_tokens: 48,
  temperature: 1,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  repetition_penalty: 1,
  stop: [],
  seed: null,
}
export const LENGTHS = { Word: 2, Sentence: 24, Paragraph: 80, Page: 320 } as const

export const defaults = remembered<Settings>('settings', { ...NEUTRAL, temperature: 0.8 })
const ofLooms = remembered<Record<string, Partial<Settings>>>('settings.looms', {})
export const presets = remembered<(Settings & { name: string })[]>('presets', [
  { name: 'Neutral', ...NEUTRAL },
  { name: 'Steady', ...NEUTRAL, temperature: 0.6, top_p: 0.95 },
  { name: 'Wild', ...NEUTRAL, temperature: 1.3, min_p: 0.05 },
])

/** What the next call uses: the defaults, and what this loom says otherwise. */
export const settings = computed<Settings>(() => {
  const loom = open.value
  return { ...defaults.value, ...(loom ? ofLooms.value[loom.id] : {}) }
})

export const hasOwn = computed(() => Object.keys(ofLooms.value[open.value?.id ?? ''] ?? {}).length > 0)

/** Change some of them: for the open loom, or for all that say nothing else. */
export function set(changes: Partial<Settings>, scope: 'loom' | 'default' = 'loom'): void {
  const loom = open.peek()
  if (scope === 'default' || !loom) {
    defaults.value = { ...defaults.peek(), ...changes }
    return
  }
  ofLooms.value = { ...ofLooms.peek(), [loom.id]: { ...ofLooms.peek()[loom.id], ...changes } }
}

/** Let the loom go back to the defaults. */
export function forgetOwn(): void {
  const loom = open.peek()
  if (!loom) return
  const { [loom.id]: _, ...rest } = ofLooms.peek()
  ofLooms.value = rest
}

/** The settings as a request for growing; what is neutral is left to the server. */
export function asked(from: Settings = settings.peek()): GrowAsked {
  const { stop, seed, ...figures } = from
  return { ...figures, ...(stop.length ? { stop } : {}), ...(seed === null ? {} : { seed }) }
}
