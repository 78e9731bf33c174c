/** Two lines that are told once: how one goes on after the first growth, and what the gauge says. */
import { X } from 'lucide-preact'
import { ROOT } from '../../model/tree'
import { ownKv } from '../../state/gauge'
import type { OpenLoom } from '../../state/loom'
import { notesSeen } from '../../state/view'
import { IconButton } from '../Button'

const see = (...names: string[]) => {
  notesSeen.value = [...new Set([...notesSeen.peek(), ...names])]
}

export function Hints({ loom }: { loom: OpenLoom }) {
  const seen = new Set(notesSeen.value)
  if (seen.has('gauge')) return null
  const lanes = [...loom.lanes.value.values()]
  const hasReused = (ownKv()?.reused ?? 0) > 0 && lanes.some((lane) => lane.parent !== ROOT)
  if (hasReused)
    return (
      <Hint
        class="of-gauge"
        text="“Reused” counts tokens that were in the cache: only new ones are computed."
        onSeen={() => see('hint', 'gauge')}
      />
    )
  if (seen.has('hint') || !lanes.length) return null
  return (
    <Hint text="→ to enter a branch, g to grow, p for probabilities, ? for keys" onSeen={() => see('hint')} />
  )
}

function Hint(props: { text: string; class?: string; onSeen: () => void }) {
  return (
    <aside class={`hint row ${props.class ?? ''}`} aria-label="Hint">
      <p class="caption">{props.text}</p>
      <IconButton icon={X} label="Do not show this again" onClick={props.onSeen} />
    </aside>
  )
}
