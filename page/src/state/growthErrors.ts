/** Errors of growth and their remedies: full memory, full context, full queue. */
import type { ApiError, GrowRequest } from '../api/client'
import { api } from '../api/client'
import { formatCount, plural } from '../model/words'
import { call } from './handlers'
import { readKv } from './kvUsage'
import { model, open } from './session'
import { settings } from './settings'
import { detailsOf, dismiss, failed, sentence, toast } from './toasts'

/** Grow again, with other settings. */
export type Retry = (other: GrowRequest) => unknown

const FEWEST_TOKENS = 8

/** Show an error of growth with its remedies. Returns false for any other error. */
export function showGrowthError(
  error: Pick<ApiError, 'code' | 'message' | 'hint' | 'details' | 'status' | 'requestId' | 'retryAfterS'>,
  retry: Retry,
): boolean {
  if (error.code === 'kv_out_of_memory' || error.code === 'out_of_memory') memoryFull(error, retry)
  else if (error.code === 'context_length_exceeded') contextFull(error)
  else if (error.code === 'queue_full') queueFull(error, retry)
  else return false
  return true
}

type Failure = Parameters<typeof showGrowthError>[0]

function memoryFull(error: Failure, retry: Retry): void {
  const { n, max_tokens } = settings.peek()
  const fewer = Math.max(1, Math.floor(n / 2))
  const shorter = Math.max(FEWEST_TOKENS, Math.floor(max_tokens / 2))
  const short = { label: plural(shorter, 'token'), run: () => void retry({ max_tokens: shorter }) }
  const offers = [{ label: 'Free unused memory', run: () => void evictOtherPaths().then(() => retry({})) }]
  if (fewer < n)
    offers.unshift({ label: plural(fewer, 'branch', 'branches'), run: () => void retry({ n: fewer }) })
  // Freeing other paths does not help a path that is larger than the memory.
  if (Number(error.details['needed_tokens']) > Number(error.details['capacity_tokens'])) offers.unshift(short)
  else offers.push(short)
  toast('Memory is full.', {
    kind: 'error',
    detail: `${sentence(error.message)}. Try again with less:`,
    offers,
    more: detailsOf(error),
  })
}

/** Forget the KV of all that is not on the way to the current node. Tokens stay. */
export async function evictOtherPaths(): Promise<void> {
  const loom = open.peek()
  if (!loom) return
  try {
    const reply = await api.forgetKv(loom.id, loom.current.peek())
    toast(reply.cold ? 'Unused memory was freed; all text is kept.' : 'All memory is in use.')
    await readKv()
  } catch (error) {
    failed(error)
  }
}

function contextFull(error: Failure): void {
  const { n_prompt_tokens: has, n_ctx: limit = model.peek()?.n_ctx } = error.details
  const loom = open.peek()
  const node = loom?.current.peek() ?? 0
  toast('The context is full.', {
    kind: 'error',
    detail:
      has && limit
        ? `The path has ${plural(Number(has), 'token')}; the model’s context has ${formatCount(Number(limit))}.`
        : `${sentence(error.message)}.`,
    offers: loom
      ? [
          { label: 'Cut off after the cursor', run: () => call('clipHere', false) },
          { label: 'Continue in a new loom', run: () => call('hoistAway', node) },
        ]
      : [],
    more: detailsOf(error),
  })
}

const MAX_WAIT_S = 30

function queueFull(error: Failure, retry: Retry): void {
  const wait = Math.min(error.retryAfterS ?? 2, MAX_WAIT_S)
  let timer = 0
  const stop = () => clearTimeout(timer)
  const id = toast('The server is busy.', {
    detail: `Trying again in ${plural(wait, 'second')}.`,
    offers: [{ label: 'Do not retry', run: stop }],
    onDismiss: stop,
    more: detailsOf(error),
  })
  timer = window.setTimeout(() => {
    dismiss(id)
    void retry({})
  }, 1000 * wait)
}
