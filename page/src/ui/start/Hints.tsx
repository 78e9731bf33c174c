/** Two hints that are shown once: how to continue after the first growth, and the meaning of the gauge. */
import { X } from 'lucide-preact'
import { ROOT } from '../../model/tree'
import { ownKv } from '../../state/kvUsage'
import type { OpenLoom } from '../../state/loom'
import { dismissedHints } from '../../state/view'
import { IconButton } from '../Button'

const dismissHints = (...names: string[]) => {
  dismissedHints.value = [...new Set([...dismissedHints.peek(), ...names])]
}

export function Hints({ loom }: { loom: OpenLoom }) {
  const dismissed = new Set(dismissedHints.value)
  if (dismissed.has('gauge')) return null
  const lanes = [...loom.lanes.value.values()]
  const hasReused = (ownKv()?.reused ?? 0) > 0 && lanes.some((lane) => lane.parent !== ROOT)
  if (hasReused)
    return (
      <Hint
        class="of-gauge"
        text="“Reused” counts tokens that were in the cache: only new ones are computed."
        onDismiss={() => dismissHints('hint', 'gauge')}
      />
    )
  if (dismissed.has('hint') || !lanes.length) return null
  return (
    <Hint
      text={
        matchMedia('(max-width: 799px), (hover: none)').matches
          ? 'Tap a branch to enter it, then grow from there. The flame shows probabilities.'
          : '→ to enter a branch, g to grow, p for probabilities, ? for keys'
      }
      onDismiss={() => dismissHints('hint')}
    />
  )
}

function Hint(props: { text: string; class?: string; onDismiss: () => void }) {
  return (
    <aside class={`hint row ${props.class ?? ''}`} aria-label="Hint">
      <p class="caption">{props.text}</p>
      <IconButton icon={X} label="Do not show this again" onClick={props.onDismiss} />
    </aside>
  )
}
