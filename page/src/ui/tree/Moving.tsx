/** A node is on its way: below which one shall it stand? */
import { X } from 'lucide-preact'
import { label } from '../../model/label'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { moving } from './rowEvents'

export function Moving({ loom }: { loom: OpenLoom }) {
  const number = moving.value
  const node = number === null ? undefined : loom.tree.get(number)
  if (!node) return null
  const { prompt, chat_template_used } = loom.info.value
  return (
    <section class="panel moving" aria-label="Move a node">
      <div class="row">
        <p class="grow" role="status">
          Move <q dir="auto">{label(node, prompt, chat_template_used ?? false, 40).text}</q> below which node?
        </p>
        <IconButton icon={X} label="Cancel moving  Esc" onClick={() => (moving.value = null)} />
      </div>
      <p class="caption">Click a row, or go to one and press Enter.</p>
    </section>
  )
}
