/** Signals whose values this browser remembers. */
import { effect, type Signal, signal } from '@preact/signals'

const PREFIX = 'weft.'

/** take: makes a value of what was kept, which may be another version's or by somebody's hand. */
export function remembered<Value>(
  name: string,
  initial: Value,
  take?: (kept: unknown) => Value,
): Signal<Value> {
  const kept = signal(read(name, initial, take))
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

export function read<Value>(
  name: string,
  initial: Value,
  take: (kept: unknown) => Value = (kept) => like(kept, initial),
): Value {
  try {
    const text = localStorage.getItem(PREFIX + name)
    return text === null ? initial : take(JSON.parse(text))
  } catch {
    return initial // broken, or the browser keeps nothing for us
  }
}

/** What was kept, where it is of the kind of `initial`; of an object each field that is. */
export function like<Value>(kept: unknown, initial: Value): Value {
  if (!isObject(initial)) return kindOf(kept) === kindOf(initial) ? (kept as Value) : initial
  if (!isObject(kept)) return initial
  return Object.fromEntries(
    Object.entries(initial).map(([name, value]) => [name, like(kept[name], value)]),
  ) as Value
}

/** For `remembered`: only one of these. */
export const among =
  <Value>(all: readonly Value[], initial: Value) =>
  (kept: unknown): Value =>
    all.find((each) => each === kept) ?? initial

/** For `remembered`: a list, of those that fit. */
export const listOf =
  <Value>(fits: (each: unknown) => each is Value) =>
  (kept: unknown): Value[] =>
    Array.isArray(kept) ? kept.filter(fits) : []

export const isObject = (value: unknown): value is Record<string, unknown> => kindOf(value) === 'object'
export const isString = (value: unknown): value is string => typeof value === 'string'

const kindOf = (value: unknown): string =>
  Array.isArray(value) ? 'array' : value === null ? 'null' : typeof value

export function write(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value))
  } catch {
    // Full or forbidden: it is remembered for as long as the page is open.
  }
}
