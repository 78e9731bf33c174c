/** The hoisted subtrees, outermost first; each step leads back. */
import { CornerLeftUp } from 'lucide-preact'
import { label } from '../../model/label'
import { ROOT } from '../../model/tree'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'

export function Breadcrumbs({ loom }: { loom: OpenLoom }) {
  const hoisted = loom.hoisted.value
  if (!hoisted.length) return null
  loom.tree.version.value
  const { prompt, chat_template_used } = loom.info.value
  const steps = [ROOT, ...hoisted]
  const backTo = (depth: number) => {
    loom.hoisted.value = hoisted.slice(0, depth)
    loom.position.saveSoon()
  }
  return (
    <nav class="crumbs row" aria-label="Subtree shown">
      <IconButton icon={CornerLeftUp} label="Leave the subtree" command="unhoist" />
      <ol class="row grow">
        {steps.map((each, i) => {
          const node = loom.tree.get(each)
          const words = node ? label(node, prompt, chat_template_used ?? false, 40).text : ''
          const isLast = i === steps.length - 1
          return (
            <li key={`${i}/${each}`} class="cut">
              {isLast ? (
                <span class="cut" dir="auto" aria-current="location">
                  {words}
                </span>
              ) : (
                <button type="button" class="cut" dir="auto" onClick={() => backTo(i)}>
                  {words}
                </button>
              )}
            </li>
          )
        })}
      </ol>
    </nav>
  )
}
