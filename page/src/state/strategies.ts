/** The search strategies of the server, loaded once. */
import { signal } from '@preact/signals'
import { api, type Schemas } from '../api/client'
import { failed } from './toasts'

export type Strategy = Schemas['StrategyObject']
export const strategies = signal<readonly Strategy[]>([])
let isRequested = false

export async function askStrategies(): Promise<void> {
  if (isRequested) return
  isRequested = true
  try {
    strategies.value = (await api.strategies()).data
  } catch (error) {
    isRequested = false
    failed(error)
  }
}

/** "Tree of thoughts" for tot. */
export function strategyTitle(name: unknown): string {
  const title = strategies.value.find((each) => each.name === name)?.title ?? String(name ?? 'search')
  return title.charAt(0).toUpperCase() + title.slice(1)
}
