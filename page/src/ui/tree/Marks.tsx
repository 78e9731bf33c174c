/** Small marks after a row's words, and the probability of its tokens. */
import { Bookmark, Pause, PenLine, Sprout, Star, TriangleAlert } from 'lucide-preact'
import type { Schemas } from '../../api/client'
import { kvStateText } from '../../model/kv_state'
import { MARK_WORDS, type Mark } from '../../model/label'
import { scoreText } from '../../model/run'
import { MAX_RATING } from '../../model/sibling_order'
import { averageProbability } from '../../model/words'

const ICONS = { bookmark: Bookmark, growing: Sprout, failed: TriangleAlert, stopped: Pause, human: PenLine }

export function MarkSign({ mark }: { mark: Mark }) {
  const Icon = mark === 'ended' ? null : ICONS[mark]
  return (
    <span class={`row-mark is-${mark}`} title={MARK_WORDS[mark]} aria-hidden>
      {Icon ? <Icon size={12} strokeWidth={2} /> : <i class="end-mark" />}
    </span>
  )
}

/** A node's score in a search, and whether the search continues it. */
export function Score({ score, isLeft }: { score: number; isLeft: boolean }) {
  const title = `Score ${scoreText(score)}${isLeft ? ', dropped by the search' : ''}`
  return (
    <span class="number" title={title} aria-hidden>
      {scoreText(score)}
    </span>
  )
}

/** A person's rating of a node. */
export function Rating({ rating }: { rating: number }) {
  return (
    <span class="row-rating number" title={`Rated ${rating} of ${MAX_RATING}`} aria-hidden>
      <Star size={12} strokeWidth={2} />
      {rating}
    </span>
  )
}

/** A thin bar: full is certain. */
export function ProbabilityBar({ p }: { p: number | null }) {
  if (p === null) return <span class="row-chance none" aria-hidden />
  return (
    <span class="row-chance" title={`${averageProbability(p)} (geometric mean)`} aria-hidden>
      <i style={{ width: `${Math.max(4, Math.round(100 * p))}%` }} />
    </span>
  )
}

/** The KV state of its path: full on the device, a ring on the host, half if cached in part. */
export function KvDot({ kv }: { kv: Schemas['NodeKv'] }) {
  const kind = `row-kv is-${kv.state}${kv.pinned ? ' is-pinned' : ''}`
  return <i class={kind} data-kv={kv.state} title={kvStateText(kv)} data-varies="drawn" aria-hidden />
}
