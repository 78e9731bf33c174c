/** Signals and values that are saved in the browser's storage. */
import { effect, type Signal, signal } from '@preact/signals'

const PREFIX = 'weft.'

/** take: validates a stored value, which another version or a person may have written. */
export function remembered<Value>(
  name: string,
  initial: Value,
  take?: (kept: unknown) => Value,
): Signal<Value> {
  const kept = signal(read(name, initial, take))
  let known = kept.peek()
  effect(() => {
    if (kept.value === known) return
    known = kept.value
    write(name, known)
  })
  return kept
}

/** As `remembered`, and all tabs have the same: what one changes is not lost when another one changes it. */
export function sharedByTabs<Value>(
  name: string,
  initial: Value,
  take?: (kept: unknown) => Value,
): Signal<Value> {
  const kept = remembered(name, initial, take)
  onOtherTab(name, () => {
    kept.value = read(name, initial, take)
  })
  return kept
}

/** Call when another tab keeps something of a name. Returns what ends it. */
export function onOtherTab(name: string, call: () => void): () => void {
  const onStorage = (event: StorageEvent) => {
    if (event.key === PREFIX + name || event.key === null) call()
  }
  globalThis.addEventListener?.('storage', onStorage)
  return () => globalThis.removeEventListener?.('storage', onStorage)
}

export function read<Value>(
  name: string,
  initial: Value,
  take: (kept: unknown) => Value = (kept) => withTypesOf(kept, initial),
): Value {
  return readFrom(() => localStorage, name, initial, take)
}

/** Of this tab alone: it outlives a reload. */
export const readOwn = <Value>(name: string, initial: Value, take: (kept: unknown) => Value): Value =>
  readFrom(() => sessionStorage, name, initial, take)

function readFrom<Value>(
  storage: () => Storage,
  name: string,
  initial: Value,
  take: (kept: unknown) => Value,
): Value {
  try {
    const text = storage().getItem(PREFIX + name)
    return text === null ? initial : take(JSON.parse(text))
  } catch {
    return initial // broken, or the browser keeps nothing for us
  }
}

/** The stored value if it has the type of `initial`; of an object, each field that has. */
export function withTypesOf<Value>(kept: unknown, initial: Value): Value {
  if (!isObject(initial)) return kindOf(kept) === kindOf(initial) ? (kept as Value) : initial
  if (!isObject(kept)) return initial
  return Object.fromEntries(
    Object.entries(initial).map(([name, value]) => [name, withTypesOf(kept[name], value)]),
  ) as Value
}

/** For `remembered`: only one of these. */
export const oneOf =
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

export const write = (name: string, value: unknown): void => writeTo(() => localStorage, name, value)
export const writeOwn = (name: string, value: unknown): void => writeTo(() => sessionStorage, name, value)

function writeTo(storage: () => Storage, name: string, value: unknown): void {
  try {
    storage().setItem(PREFIX + name, JSON.stringify(value))
  } catch {
    // Full or forbidden: it is remembered for as long as the page is open.
  }
}
