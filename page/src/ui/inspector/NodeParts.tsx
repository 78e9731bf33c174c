/** Parts of the node tab: notes, KV, and position in the tree. */

import { signal } from '@preact/signals'
import { Bookmark } from 'lucide-preact'
import { useState } from 'preact/hooks'
import type { KvOp, Node } from '../../api/client'
import { KV_STATE_TEXTS } from '../../model/kv_state'
import { MAX_RATING } from '../../model/sibling_order'
import { ROOT } from '../../model/tree'
import { oneLine } from '../../model/words'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import { ownKv } from '../../state/kvUsage'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { Choice } from '../Choice'
import { Facts } from './Facts'
import { TextField } from './TextField'

interface NotesProps {
  node: Node
  known: Node | null
  onChange: () => void
}

export function Notes({ node, known, onChange }: NotesProps) {
  const label = node.bookmark ?? null
  const note = known?.meta?.['note']
  return (
    <section class="part" aria-label="Notes">
      <div class="row">
        <TextField
          kind="input"
          label="Label of the bookmark"
          placeholder={label === null ? 'Not bookmarked' : 'A label'}
          disabled={label === null}
          value={label ?? ''}
          onSave={(text) => void act.bookmark(node.node, text)}
        />
        <IconButton icon={Bookmark} label="Bookmark" command="bookmark" pressed={label !== null} />
      </div>
      {node.parent !== null && <Rating node={node} />}
      <TextField
        kind="textarea"
        label="Note"
        placeholder="A note"
        disabled={!known}
        value={typeof note === 'string' ? note : ''}
        onSave={(text) => void act.note(node.node, text).then(onChange)}
      />
    </section>
  )
}

/** A person's rating of a node, which sorts siblings and ranks exported pairs. */
function Rating({ node }: { node: Node }) {
  const values = ['–', ...Array.from({ length: MAX_RATING }, (_, i) => String(i + 1))]
  return (
    <div class="row">
      <span class="grow" title={`${keyFor('rate-up')} and ${keyFor('rate-down')} change it`}>
        Rating
      </span>
      <Choice
        label="Rating"
        values={values.map((each) => ({ value: each, label: each }))}
        chosen={node.rating == null ? '–' : String(node.rating)}
        onChoose={(value) => void act.rate(node.node, value === '–' ? null : Number(value))}
      />
    </div>
  )
}

export function Kv({ node, known }: { node: number; known: Node | null }) {
  const kv = known?.kv ?? null
  const isPinned = kv?.pinned ?? false
  const hasHost = (ownKv()?.offload_budget_bytes ?? 0) > 0
  const handle = (op: KvOp) => void act.handleKv(node, op)
  return (
    <section class="part" aria-label="KV cache">
      <Facts
        of={[
          {
            name: 'KV cache',
            hint: 'Whether the path to this node is in the KV cache.',
            value: kv === null ? null : KV_STATE_TEXTS[kv.state],
          },
          {
            name: 'Pinned',
            hint: 'A pinned path stays in memory until it is unpinned or removed, or the server stops.',
            value: kv === null ? null : isPinned ? 'yes' : 'no',
          },
        ]}
      />
      <div class="actions">
        <button
          type="button"
          class="button"
          disabled={!kv || kv.state === 'hot'}
          onClick={() => handle('warm')}
        >
          Preload
        </button>
        <button
          type="button"
          class="button"
          disabled={!kv}
          title={
            isPinned ? 'Allow its KV cache to be evicted again.' : 'Keep the KV cache of its path in memory.'
          }
          onClick={() => handle(isPinned ? 'unpin' : 'pin')}
        >
          {isPinned ? 'Unpin' : 'Pin'}
        </button>
        {hasHost && (
          <button
            type="button"
            class="button"
            disabled={!kv || isPinned || !kv.bytes}
            title="Moves the KV cache of this node’s tokens to host memory; it is copied back when needed."
            onClick={() => handle('offload')}
          >
            Move to host memory
          </button>
        )}
        <button
          type="button"
          class="button"
          disabled={!kv || isPinned || kv.state === 'cold'}
          title="Frees the KV cache of this node’s tokens; it is recomputed when needed."
          onClick={() => handle('evict')}
        >
          Free memory
        </button>
      </div>
    </section>
  )
}

/** The node that is about to be moved; null: none. */
const carried = signal<number | null>(null)

export function Shape({ loom, node }: { loom: OpenLoom; node: number }) {
  const [isNaming, setNaming] = useState(false)
  const moving = carried.value !== null && loom.tree.get(carried.value) ? carried.value : null
  const canDrop = moving !== null && !loom.tree.isBelow(node, moving) && loom.tree.parent(moving) !== node
  return (
    <section class="part" aria-label="Structure">
      {moving !== null && (
        <>
          <p class="caption">
            Moving <q dir="auto">{oneLine(loom.tree.get(moving)?.text ?? '', 40)}</q>. Go to its new parent
            node.
          </p>
          <div class="actions">
            <button
              type="button"
              class="button"
              disabled={!canDrop}
              onClick={() => {
                carried.value = null
                void act.move(moving, node).then((changed) => changed && loom.navigate(moving))
              }}
            >
              Move below this node
            </button>
            <button type="button" class="button plain" onClick={() => (carried.value = null)}>
              Cancel
            </button>
          </div>
        </>
      )}
      <div class="actions">
        <button
          type="button"
          class="button"
          disabled={node === ROOT}
          title="Removes all nodes outside the path to this one; Undo restores them."
          onClick={() => void act.remove(node, 'others')}
        >
          Keep only this path
        </button>
        <button
          type="button"
          class="button"
          disabled={node === ROOT || moving === node}
          onClick={() => (carried.value = node)}
        >
          Move
        </button>
        <button type="button" class="button" aria-expanded={isNaming} onClick={() => setNaming(!isNaming)}>
          Copy to a new loom
        </button>
      </div>
      {isNaming && (
        <form
          class="row"
          onSubmit={(event) => {
            event.preventDefault()
            const field = event.currentTarget.elements.namedItem('name') as HTMLInputElement
            const name = field.value.trim()
            if (name) void act.copyOut(node, name).then((changed) => changed && setNaming(false))
          }}
        >
          <input
            class="field"
            name="name"
            aria-label="Name of the new loom"
            placeholder="Name"
            maxLength={200}
            ref={(field) => field?.focus()}
            onKeyDown={(event) => event.key === 'Escape' && setNaming(false)}
          />
          <button type="submit" class="button">
            Copy
          </button>
        </form>
      )}
    </section>
  )
}
