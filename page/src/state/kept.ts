/** Signals whose values this browser remembers. */
import { effect, type Signal, signal } from '@preact/signals'

const PREFIX = 'weft.'

export function remembered<Value>(name: string, initial: Value): Signal<Value> {
  const kept = signal(read(name, initial))
  let isFirst = true
  effect(() => {
    const value = kept.value
    if (isFirst) {
      isFirst = false
      return
    }
    write(name, value)
  })
  return kept
}

export function read<Value>(name: string, initial: Value): Value {
  try {
    const text = localStorage.getItem(PREFIX + name)
    if (text === null) return initial
    const value = JSON.parse(text) as Value
    const isObject = typeof initial === 'object' && initial !== null && !Array.isArray(initial)
    // Of another kind than it is: another version's, or somebody's hand.
    if (typeof value !== typeof initial || Array.isArray(value) !== Array.isArray(initial)) return initial
    return isObject ? { ...initial, ...value } : value
  } catch {
    return initial // broken, or the browser keeps nothing for us
  }
}

export function write(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value))
  } catch {
    // Full or forbidden: it is remembered for as long as the page is open.
  }
}
