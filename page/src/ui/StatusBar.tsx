/** The foot of the page: connection, what grows, the heat's legend, and what sharing has saved. */
import { useSignal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { percent, shareReused, timesShared } from '../model/kv_savings'
import { bytes, formatCount, plural, seconds } from '../model/words'
import { ownKv } from '../state/kvUsage'
import type { OpenLoom } from '../state/loom'
import { isAway } from '../state/session'
import { overlay } from '../state/view'
import { TextButton } from './Button'
import { HeatLegend } from './reading/Legend'
import './status.css'

export function StatusBar({ loom }: { loom: OpenLoom }) {
  const isLost = isAway.value || !loom.feed.isConnected.value
  return (
    <footer class="status row">
      {isLost ? (
        <span class="error" role="status">
          Reconnecting. Nothing is lost.
        </span>
      ) : (
        <Growing loom={loom} />
      )}
      <HeatLegend />
      <span class="grow" />
      <Nodes loom={loom} />
      <Saving />
    </footer>
  )
}

function Growing({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value // a branch that ends changes the tree, and not the lanes
  const n = [...loom.lanes.value.values()].filter((lane) => !lane.isOver).length
  if (!n) return null
  return (
    <span class="row growing">
      <span role="status">{plural(n, 'branch', 'branches')} growing</span>
      <TextButton kind="plain" command="stop-all">
        Stop all
      </TextButton>
    </span>
  )
}

function Nodes({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const loading = loom.sync.loading.value
  return (
    <span class="n-nodes">
      {loading
        ? `${formatCount(loading.done)} of ${plural(loading.total, 'node')}`
        : plural(loom.tree.size, 'node')}
    </span>
  )
}

/** KV 412 MB / 4 GB · without sharing 3.1 GB (saves 87 %) · reused 18 902 tokens, computed 214 (99 %) · ≈ 41 s saved */
function Saving() {
  const kv = ownKv()
  const reused = useCountedUp(kv?.reused ?? 0)
  if (!kv) return null
  const times = timesShared(kv)
  const share = shareReused(kv)
  return (
    <button
      type="button"
      class="saving"
      title="Memory: size and savings of the KV cache"
      aria-label={`Memory: KV ${bytes(kv.kv_bytes)}${times ? `, ${times.toFixed(1)} times shared` : ''}`}
      onClick={() => (overlay.value = 'gauge')}
      data-varies
    >
      <span>
        KV {bytes(kv.kv_bytes)}
        {kv.kv_budget_bytes !== null && <span class="wide-only"> / {bytes(kv.kv_budget_bytes)}</span>}
      </span>
      {times && (
        <span>
          <span class="full">without sharing {bytes(kv.kv_bytes_unshared)} (</span>
          saves {percent(1 - 1 / times)}
          <span class="full">)</span>
        </span>
      )}
      {share !== null && (
        <span>
          reused{' '}
          <span class="full">
            {formatCount(reused)} tokens, computed {formatCount(kv.prefilled)} (
          </span>
          {percent(share)}
          <span class="full">)</span>
        </span>
      )}
      {kv.saved_s !== null && kv.saved_s >= 0.1 && (
        <span class="wide-only">≈ {seconds(kv.saved_s)} saved</span>
      )}
    </button>
  )
}

const COUNTS_MS = 200
const isStill = () => matchMedia('(prefers-reduced-motion: reduce)').matches

/** A number that counts up to its value, so that a change is noticed. */
function useCountedUp(to: number): number {
  const shown = useSignal(to)
  useEffect(() => {
    const from = shown.peek()
    if (to <= from || from === 0 || isStill()) {
      shown.value = to
      return
    }
    let frame = 0
    const began = performance.now()
    const step = (now: number) => {
      const share = Math.min(1, (now - began) / COUNTS_MS)
      shown.value = Math.round(from + (to - from) * (1 - (1 - share) ** 3))
      if (share < 1) frame = requestAnimationFrame(step)
    }
    frame = requestAnimationFrame(step)
    return () => cancelAnimationFrame(frame)
  }, [to])
  return shown.value
}
