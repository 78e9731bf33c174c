/** The bookmarks of the loom, with their labels. */

import { signal } from '@preact/signals'
import { Bookmark, BookmarkX, PenLine } from 'lucide-preact'
import { label } from '../../model/label'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'

/** Whether the list is shown. */
export const hasBookmarks = signal(false)
/** The bookmark whose label is being written. */
export const labelling = signal<number | null>(null)

export function Bookmarks({ loom }: { loom: OpenLoom }) {
  if (!hasBookmarks.value && labelling.value === null) return null
  const nodes = loom.bookmarks.value
  return (
    <section class="panel bookmarks" aria-label="Bookmarks">
      <h2 class="caption">Bookmarks</h2>
      {nodes.length === 0 && (
        <p class="caption">None yet. {keyFor('bookmark')} marks the node where you are.</p>
      )}
      <ul>
        {nodes.map((each) => (
          <BookmarkRow key={each} loom={loom} number={each} />
        ))}
      </ul>
    </section>
  )
}

function BookmarkRow({ loom, number }: { loom: OpenLoom; number: number }) {
  loom.tree.version.value
  const node = loom.tree.get(number)
  if (!node) return null
  const { prompt, chat_template_used } = loom.info.value
  const words = label(node, prompt, chat_template_used ?? false, 60)
  const isHere = loom.current.value === number
  if (labelling.value === number) return <LabelField number={number} label={node.bookmark ?? ''} />
  return (
    <li class="bookmark-row row" data-bookmark={number} aria-current={isHere ? 'true' : undefined}>
      <button type="button" class="grow cut" onClick={() => loom.go(number)}>
        <Bookmark size={12} aria-hidden />
        {node.bookmark && <b dir="auto">{node.bookmark}</b>}
        <span class={node.bookmark ? 'muted' : ''} dir="auto">
          {words.text}
        </span>
      </button>
      <span class="row-deeds">
        <IconButton icon={PenLine} label="Write a label" onClick={() => (labelling.value = number)} />
        <IconButton
          icon={BookmarkX}
          label="Remove the bookmark"
          onClick={() => void act.bookmark(number, null)}
        />
      </span>
    </li>
  )
}

function LabelField({ number, label: now }: { number: number; label: string }) {
  const done = (text: string | null) => {
    if (labelling.peek() !== number) return
    labelling.value = null
    if (text !== null && text !== now) act.bookmark(number, text)
    document.querySelector<HTMLElement>('[role=tree]')?.focus()
  }
  return (
    <li class="bookmark-row row">
      <input
        class="field"
        aria-label="Label of the bookmark"
        placeholder="Label"
        maxLength={200}
        defaultValue={now}
        ref={(field) => {
          if (!field || document.activeElement === field) return
          field.focus()
          field.select()
        }}
        onBlur={(event) => done(event.currentTarget.value.trim())}
        onKeyDown={(event) => {
          if (event.key === 'Enter') done(event.currentTarget.value.trim())
          else if (event.key === 'Escape') done(null)
          else return
          event.preventDefault()
          event.stopPropagation()
        }}
      />
    </li>
  )
}
