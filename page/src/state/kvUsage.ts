/** The size and the savings of the KV cache: read while something grows, and once after it. */
import { effect, signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../api/client'
import { isAway, model, open } from './session'
import { failed } from './toasts'

const EVERY_MS = 2000
const FIRST_MS = 500

export const kv = signal<readonly Schemas['KvObject'][]>([])
/** Of the model that grows the open loom. */
export const ownKv = () => kv.value.find((each) => each.model === model.value?.id) ?? null

/** Increases when this page changes the KV of a node. */
export const kvVersion = signal(0)

/** Mark the KV numbers as outdated. */
export function kvChanged(): void {
  kvVersion.value += 1
  void readKv()
}

let asking: Promise<void> | null = null
let askingNext: Promise<void> | null = null

/** Read now. If a read is pending, read again after it: its numbers may be older than this call. */
export function readKv(): Promise<void> {
  if (asking) {
    askingNext ??= asking.then(() => {
      askingNext = null
      return readKv()
    })
    return askingNext
  }
  asking = api
    .kv()
    .then((reply) => {
      kv.value = reply.data
    })
    .catch((error: unknown) => {
      if (!(error instanceof ApiError && error.isAway)) failed(error)
    })
    .finally(() => {
      asking = null
    })
  return asking
}

effect(() => {
  const loom = open.value
  if (!loom || isAway.value || model.value === null) return
  void readKv()
  if (!loom.isGrowing) return
  // When it has ended this runs again, which is the one more time.
  const read = () => document.hidden || void readKv()
  const soon = setTimeout(read, FIRST_MS) // when the first numbers can exist
  const timer = setInterval(read, EVERY_MS)
  return () => {
    clearTimeout(soon)
    clearInterval(timer)
  }
})
