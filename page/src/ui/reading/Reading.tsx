/** The text that leads to the current node, and what grows from it. */
import { useLayoutEffect, useRef } from 'preact/hooks'
import { authorNoteOf, placeOf } from '../../model/author_note'
import { oneLine } from '../../model/words'
import { run } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { resetTokenCursor } from '../../state/reading'
import { systemOf } from '../../state/system'
import { sentence } from '../../state/toasts'
import { ActionBar } from './ActionBar'
import { Children } from './Children'
import { Waiting, Writer } from './Editor'
import { Margin } from './Margin'
import { PathText } from './PathText'
import { TokenCard } from './TokenCard'
import { usePointing } from './usePointing'
import { useReadingKeys } from './useReadingKeys'
import { useScrollPosition } from './useScrollPosition'
import './reading.css'
import './lanes.css'
import './token-card.css'

export function Reading({ loom }: { loom: OpenLoom }) {
  const pane = useRef<HTMLDivElement>(null)
  const text = useRef<HTMLDivElement>(null)
  useLayoutEffect(resetTokenCursor, [loom])
  useReadingKeys(loom)
  usePointing(loom, text)
  useScrollPosition(loom, pane)
  loom.tree.version.value
  const current = loom.current.value
  useLayoutEffect(() => leaveDraft(loom), [current, loom.sync.loading.value])
  const path = loom.tree.path(current)
  const hasBelow =
    loom.tree.children(current).length > 0 ||
    [...loom.lanes.value.values()].some((each) => each.parent === current)
  return (
    <div class="reading" ref={pane}>
      <div class="breadth">
        <div class="sheet" data-below={hasBelow || undefined}>
          <System loom={loom} />
          <div class="woven" ref={text}>
            <PathText loom={loom} path={path} />
            <Margin loom={loom} path={path} text={text} />
          </div>
          <End loom={loom} />
          <Children loom={loom} />
        </div>
      </div>
      <TokenCard loom={loom} />
    </div>
  )
}

/** The system prompt of a chat, on one line above it. */
function System({ loom }: { loom: OpenLoom }) {
  const text = systemOf(loom.info.value)
  if (!text) return null
  return (
    <p class="caption system">
      <button type="button" class="button plain cut" title={text} onClick={() => run('loom')}>
        System prompt: {oneLine(text, 120)}
      </button>
    </p>
  )
}

/** The author's note, which is in the context of what grows next, but not in the text. */
function InsertedNote({ loom }: { loom: OpenLoom }) {
  const note = authorNoteOf(loom.info.value)
  if (!note.text) return null
  return (
    <p class="caption system">
      <button
        type="button"
        class="button plain cut"
        title={note.text}
        data-author-note
        onClick={() => run('loom')}
      >
        Author’s note, read {placeOf(note, loom.isChat)}: {oneLine(note.text, 80)}
      </button>
    </p>
  )
}

/** Close a draft when the user navigates away: it stays stored at its node. */
function leaveDraft(loom: OpenLoom): void {
  const draft = loom.drafts.open
  if (!draft || loom.sync.loading.peek() !== null) return
  const current = loom.current.peek()
  const isShown = draft.kind === 'child' ? draft.node === current : loom.tree.isBelow(current, draft.node)
  if (!isShown) loom.drafts.close()
}

/** The end of the text: what is being written, what waits, what can be done. */
function End({ loom }: { loom: OpenLoom }) {
  const current = loom.current.value
  const written = loom.drafts.open
  // One that is open elsewhere in the tree waits there.
  const draft = written && loom.tree.isBelow(current, written.node) ? written : null
  const waiting = loom.drafts.all.value.filter((each) => each.node === current && !each.isOpen)
  const prompt = loom.info.value
  const isSpaced = prompt.chat_template_used !== true && current === 0 && /[^\S\n]$/.test(prompt.prompt)
  return (
    <div class="end">
      {draft?.kind === 'child' && draft.node === current && <Writer loom={loom} draft={draft} />}
      {isSpaced && !draft && (
        <p class="caption warn">The prompt ends with a space. Most models continue better without it.</p>
      )}
      <InsertedNote loom={loom} />
      {loom.tree.get(current)?.error && <p class="error">{sentence(loom.tree.get(current)!.error!)}</p>}
      {waiting.map((each) => (
        <Waiting key={each.kind} loom={loom} draft={each} />
      ))}
      {!draft && <ActionBar loom={loom} />}
    </div>
  )
}
