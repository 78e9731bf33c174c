/** The actions of several nodes: grow all, or remove them. */
import { X } from 'lucide-preact'
import { formatCount, plural } from '../../model/words'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, server } from '../../state/session'
import { settings } from '../../state/settings'
import { toast } from '../../state/toasts'
import { IconButton, TextButton } from '../Button'

/** The cost of growing several nodes, and the server's limit. */
function plan(loom: OpenLoom) {
  const nodes = [...loom.selected.value].filter((each) => !loom.tree.get(each)?.ended)
  const { n: wanted, max_tokens } = settings.value
  const maxBranches = server.value?.limits?.['branches'] ?? 1024
  const n = Math.min(wanted, Math.floor(maxBranches / Math.max(1, nodes.length)))
  return { nodes, n, wanted, maxBranches, branches: n * nodes.length, tokens: n * nodes.length * max_tokens }
}

export function growSelected(loom: OpenLoom): void {
  const { nodes, n, maxBranches } = plan(loom)
  if (!nodes.length) toast('All selected nodes have ended.')
  else if (n < 1)
    toast(
      `At most ${formatCount(maxBranches)} branches can grow at once; ${formatCount(nodes.length)} are selected.`,
    )
  else {
    loom.selected.value = new Set()
    act.growMany(nodes, { n })
  }
}

export function Selected({ loom }: { loom: OpenLoom }) {
  const selected = loom.selected.value
  if (!selected.size) return null
  loom.tree.version.value
  const { nodes, n, wanted, maxBranches, branches, tokens } = plan(loom)
  const ended = selected.size - nodes.length
  return (
    <section class="panel selected" aria-label="Selected nodes">
      <div class="row">
        <span class="grow">{plural(selected.size, 'node')} selected</span>
        <IconButton icon={X} label="Select none  Esc" onClick={() => (loom.selected.value = new Set())} />
      </div>
      <p class="caption" role="status">
        {n >= 1 && nodes.length > 0 && (
          <>
            {formatCount(nodes.length)} × {formatCount(n)} = {plural(branches, 'branch', 'branches')}, at most{' '}
            {plural(tokens, 'token')}.
          </>
        )}
        {ended > 0 && ` ${plural(ended, 'node')} ended and will not grow.`}
        {n >= 1 && n < wanted && ` The server’s limit is ${formatCount(maxBranches)} branches at once.`}
        {n < 1 && `The server’s limit is ${formatCount(maxBranches)} branches at once: select fewer nodes.`}
      </p>
      <div class="row">
        <TextButton
          kind="main"
          disabled={isReadOnly.value || n < 1 || !nodes.length}
          onClick={() => growSelected(loom)}
        >
          Grow {formatCount(Math.max(1, n))} each
        </TextButton>
        <TextButton onClick={() => void act.removeMany([...selected])}>Remove</TextButton>
      </div>
    </section>
  )
}
