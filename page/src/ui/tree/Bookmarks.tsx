/** The bookmarks of the loom, with their labels. */

import { signal } from '@preact/signals'
import { Bookmark, BookmarkX, Pencil } from 'lucide-preact'
import { useLayoutEffect, useRef } from 'preact/hooks'
import { label } from '../../model/label'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { focusTree } from './rowEvents'

/** True if the list is shown. */
export const hasBookmarks = signal(false)
/** The bookmark whose label is being written. */
export const labelling = signal<number | null>(null)

export function Bookmarks({ loom }: { loom: OpenLoom }) {
  const box = useRef<HTMLElement>(null)
  const isOpen = hasBookmarks.value
  // At once: the next key is meant for the list.
  useLayoutEffect(() => {
    if (!isOpen) return
    const find = (which: string) => box.current?.querySelector<HTMLElement>(`${which} > button`)
    ;(find('[aria-current]') ?? find('li'))?.focus()
  }, [isOpen])
  if (!isOpen && labelling.value === null) return null
  const nodes = loom.bookmarks.value
  return (
    <section
      ref={box}
      class="panel bookmarks"
      aria-label="Bookmarks"
      onKeyDown={(event) => listKey(event, box.current!)}
    >
      <h2 class="caption">Bookmarks</h2>
      {nodes.length === 0 && (
        <p class="caption">None yet. {keyFor('bookmark')} bookmarks the current node.</p>
      )}
      <ul>
        {nodes.map((each) => (
          <BookmarkRow key={each} loom={loom} number={each} />
        ))}
      </ul>
    </section>
  )
}

/** Keys of the list: the arrows walk it, Delete takes a mark away, Escape closes it. */
function listKey(event: KeyboardEvent, box: HTMLElement): void {
  if (event.target instanceof HTMLInputElement) return
  const rows = [...box.querySelectorAll<HTMLElement>('[data-bookmark]')]
  const at = rows.findIndex((each) => each.contains(event.target as Node))
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key]
  if (by) rows[at + by]?.querySelector('button')?.focus()
  else if (event.key === 'Escape') {
    hasBookmarks.value = false
    focusTree()
  } else if ((event.key === 'Delete' || event.key === 'Backspace') && at >= 0) {
    const next = rows[at + 1] ?? rows[at - 1]
    void act.bookmark(Number(rows[at]!.dataset['bookmark']), null)
    if (next) next.querySelector('button')?.focus()
    else focusTree()
  } else return
  event.preventDefault()
  event.stopPropagation()
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
      <button
        type="button"
        class="grow cut"
        onClick={() => {
          loom.navigate(number)
          focusTree()
        }}
      >
        <Bookmark size={12} aria-hidden />
        {node.bookmark && <b dir="auto">{node.bookmark}</b>}
        <span class={node.bookmark ? 'muted' : ''} dir="auto">
          {words.text}
        </span>
      </button>
      <span class="row-actions">
        <IconButton icon={Pencil} label="Edit the label" onClick={() => (labelling.value = number)} />
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
    focusTree()
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
