/** What KV takes and has saved: asked for while something grows, and once after. */
import { effect, signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../api/client'
import { isAway, model, open } from './session'
import { failed } from './toasts'

const EVERY_MS = 2000
const FIRST_MS = 500

export const kv = signal<readonly Schemas['KvObject'][]>([])
/** Of the model that grows the open loom. */
export const ownKv = () => kv.value.find((each) => each.model === model.value?.id) ?? null

/** Rises when somebody did something to the KV of a node here. */
export const kvTurn = signal(0)

/** What is known of KV is old. */
export function kvChanged(): void {
  kvTurn.value += 1
  void readKv()
}

let asking: Promise<void> | null = null
let askingNext: Promise<void> | null = null

/** Ask now, or once more when what is under way has been told: that may be older than this call. */
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
    .then((told) => {
      kv.value = told.data
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
  const soon = setTimeout(read, FIRST_MS) // once there is something to tell
  const timer = setInterval(read, EVERY_MS)
  return () => {
    clearTimeout(soon)
    clearInterval(timer)
  }
})
