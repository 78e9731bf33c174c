/** One branch: its last lines in a fixed height while branches grow, then all of its text. */
import { Copy, RotateCcw, Square, X } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { emptyLabel } from '../../model/label'
import type { Lane as LaneState } from '../../model/lane'
import { averageProbability, finishWord, formatCount, plural, shortName } from '../../model/words'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly } from '../../state/session'
import { sentence } from '../../state/toasts'
import { copyText } from '../copy'
import { isBranchRendered, RenderedBranch } from './Rendered'

/** Text before the last so many characters is not drawn: it is off screen, and its layout would be slow. */
const DRAWN = 6000
const STEP = 3000

interface LaneProps {
  loom: OpenLoom
  lane: LaneState
  /** Its place among the children, from 1: the digit that selects it. */
  k: number
}

export function Lane({ loom, lane, k }: LaneProps) {
  lane.version.value
  const isFailed = lane.state === 'failed'
  const [isUnfolded, setUnfolded] = useState(false)
  const isFull = isUnfolded || lane.isOver
  const opens = lane.state === 'done' && loom.tree.get(lane.node) !== undefined
  const isThere = loom.tree.get(lane.node) !== undefined
  const text = tail(lane.text, isFull).replace(/^[^\S\n]+/, '')
  const isEmpty = lane.isOver && !lane.text && !isFailed
  return (
    <article
      class="child lane"
      data-lane={lane.node}
      data-child={isThere ? lane.node : undefined}
      data-state={lane.state}
      aria-label={`Branch ${k}`}
      aria-busy={!lane.isOver}
    >
      <button
        type="button"
        class="k"
        aria-label={`Go to branch ${k}`}
        title={k < 10 ? `Go to this branch  ${k}` : 'Go to this branch'}
        disabled={!isThere}
        onClick={() => loom.navigate(lane.node)}
      >
        {k}
      </button>
      <div
        class={`lane-text ${isUnfolded ? 'whole' : ''}`}
        title={opens ? 'Go to this branch' : lane.isOver ? undefined : isUnfolded ? 'Fold' : 'Show all'}
        onClick={() => {
          if (getSelection()?.toString()) return
          if (opens) loom.navigate(lane.node)
          else setUnfolded(!isUnfolded)
        }}
        onDblClick={() => loom.navigate(lane.node)}
      >
        {isEmpty ? (
          <p class="muted">{emptyLabel(lane.finish === 'stop')}</p>
        ) : isBranchRendered(loom, text) ? (
          <RenderedBranch text={text} />
        ) : (
          <p>{text}</p>
        )}
      </div>
      <Caption loom={loom} lane={lane} />
    </article>
  )
}

function Caption({ loom, lane }: { loom: OpenLoom; lane: LaneState }) {
  if (lane.state === 'failed') return <Failed loom={loom} lane={lane} />
  const node = loom.tree.get(lane.node)
  const stats = [
    lane.model && shortName(lane.model),
    lane.meanP !== null && averageProbability(lane.meanP),
    lane.nTokens && plural(lane.nTokens, 'token'),
  ]
  if (lane.isOver)
    return <p class="caption row">{joined(...stats, finishWord(lane.finish, node?.stop_string ?? null))}</p>
  return (
    <p class="caption row">
      <span data-varies>
        {joined(...stats, lane.rate !== null && `${formatCount(lane.rate)} tok/s`) || 'waiting'}
      </span>
      <button
        type="button"
        class="button plain"
        title="Stop; its text is kept"
        onClick={() => void act.stopBranch(lane.node)}
      >
        <Square aria-hidden />
        Stop
      </button>
    </p>
  )
}

export const joined = (...parts: (string | number | false | null | undefined)[]): string =>
  parts.filter(Boolean).join(' · ')

function tail(text: string, isFull: boolean): string {
  if (isFull || text.length <= DRAWN) return text
  return text.slice(Math.ceil((text.length - DRAWN) / STEP) * STEP)
}

/** The actions of a failed branch. Its text is a node of the tree. */
function Failed({ loom, lane }: { loom: OpenLoom; lane: LaneState }) {
  lane.version.value
  return (
    <div class="caption row failed">
      <span class="error grow">{sentence(lane.error) || 'Failed.'}</span>
      <button
        type="button"
        class="button plain"
        title={`Retry  ${keyFor('retry')}`}
        disabled={isReadOnly.value}
        onClick={() => void act.retry([lane])}
      >
        <RotateCcw aria-hidden />
        Retry
      </button>
      {lane.text !== '' && (
        <button type="button" class="button plain" onClick={() => void copyText(lane.text, 'the text')}>
          <Copy aria-hidden />
          Copy
        </button>
      )}
      <button
        type="button"
        class="button plain"
        aria-label={`Dismiss branch ${lane.branch + 1}`}
        title="Dismiss"
        onClick={() => loom.growth.dismiss([lane])}
      >
        <X aria-hidden />
      </button>
    </div>
  )
}

/** A requested branch that has not started. */
export function Expected({ k }: { k: number }) {
  return (
    <div class="child lane" aria-hidden="true">
      <span class="k">{k}</span>
      <div class="lane-text" />
      <p class="caption row">waiting</p>
    </div>
  )
}
