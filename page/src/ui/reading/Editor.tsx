/** A text area over a node, or below the text for a new one; what is typed is never lost. */
import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import { ApiError } from '../../api/client'
import { ROOT } from '../../model/tree'
import { shownText } from '../../model/turns'
import { formatCount, plural } from '../../model/words'
import * as act from '../../state/actions'
import type { Draft } from '../../state/drafts'
import { shown as keyShown } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { cursor } from '../../state/reading'
import { nSeveralAnswers } from '../../state/settings'
import { failed, toast } from '../../state/toasts'
import { Choice } from '../Choice'
import { charIndex } from './tokens'

const KINDS = [
  { value: 'message', label: 'Your message' },
  { value: 'answer', label: 'Text of the answer' },
] as const

interface EditorProps {
  loom: OpenLoom
  draft: Draft
}

export function Editor({ loom, draft }: EditorProps) {
  const [problem, setProblem] = useState('')
  const [isBusy, setBusy] = useState(false)
  const isRoot = draft.node === ROOT
  const isChanged = draft.text !== draft.base
  loom.tree.version.value // what stands below it, and what it says now

  const save = async (inPlace: boolean, grows = false) => {
    if (isBusy) return
    if (!isChanged) return loom.drafts.drop(draft)
    setBusy(true)
    try {
      await act.edit(draft.node, draft.text, { ...draft, inPlace })
      loom.drafts.drop(draft)
      if (grows) void act.grow(inPlace ? draft.node : loom.current.peek())
    } catch (error) {
      if (!(error instanceof ApiError)) return failed(error)
      const currentText = loom.tree.get(draft.node)?.text ?? ''
      if (isRoot && draft.isMessage && error.status === 400 && currentText !== draft.base) {
        // The node has several messages: replace the edited part.
        const text = currentText.replace(draft.base, () => draft.text)
        loom.drafts.change(draft, { isMessage: false, base: currentText, text })
        return setProblem('The prompt has several messages. This is the full text; save it again.')
      }
      if (error.code === 'revision_mismatch') {
        // A second save confirms the change of the other client. The reply may arrive before its event.
        await loom.sync.refresh().catch(() => {})
        loom.drafts.change(draft, { rev: loom.tree.rev })
      }
      setProblem(messageOf(error, loom.growth.growsAt(draft.node)))
    } finally {
      setBusy(false)
    }
  }
  const recomputed = tokensBelow(loom, draft.node)
  const node = loom.tree.get(draft.node)
  const now = node ? shownText(node, loom.info.value, false) : ''
  return (
    <div class="editor" data-edits={draft.node}>
      <Area
        draft={draft}
        loom={loom}
        label={isRoot ? 'The prompt' : 'Text of the node'}
        onKey={(key) => {
          if (key === 'Mod+s' || key === 'Mod+Enter') void save(isRoot || draft.inPlace)
          else if (key === 'Mod+Shift+s') void save(true)
          else if (key === 'Mod+Shift+Enter') void save(isRoot || draft.inPlace, true)
          else return false
          return true
        }}
      />
      {problem && (
        <p class="error" role="alert">
          {problem}
        </p>
      )}
      {problem && now !== draft.base && (
        <details class="caption theirs">
          <summary>Current text</summary>
          <p dir="auto">{now}</p>
        </details>
      )}
      <Trailing loom={loom} draft={draft} />
      <div class="row editing">
        {!isRoot && (
          <button
            type="button"
            class={`button ${draft.inPlace ? '' : 'main'}`}
            title={draft.inPlace ? undefined : keyShown('Mod+s')}
            disabled={isBusy}
            onClick={() => void save(false)}
          >
            Save as sibling
          </button>
        )}
        <button
          type="button"
          class={`button ${isRoot || draft.inPlace ? 'main' : ''}`}
          title={keyShown(isRoot || draft.inPlace ? 'Mod+s' : 'Mod+Shift+s')}
          disabled={isBusy}
          onClick={() => void save(true)}
        >
          {isRoot ? 'Save the prompt' : 'Save in place'}
        </button>
        <button type="button" class="button plain" title="Esc" onClick={() => loom.drafts.close()}>
          Close (draft kept)
        </button>
        {isChanged && (
          <button type="button" class="button plain" onClick={() => loom.drafts.drop(draft)}>
            Discard
          </button>
        )}
        <span class="caption grow">
          {recomputed
            ? `In place, ${plural(recomputed, 'token')} below ${recomputed === 1 ? 'is' : 'are'} recomputed`
            : isRoot
              ? 'It has no children yet'
              : 'In place, nothing is recomputed'}
        </span>
      </div>
    </div>
  )
}

/** The editor of a new child; in a chat it is the user's next message. */
export function Writer({ loom, draft }: EditorProps) {
  const [isBusy, setBusy] = useState(false)
  const isGrowing = loom.lanes.value.get(draft.node)?.isOver === false
  const canAdd = !isBusy && !isGrowing && draft.text !== ''
  const add = async (work: () => Promise<unknown>) => {
    if (isGrowing || isBusy) return void toast('The answer is still growing: stop it, or wait, to send.')
    if (!canAdd) return
    setBusy(true)
    await work()
    setBusy(false)
  }
  const write = async () => {
    const added = await act.write(draft.node, draft.text, draft.isMessage)
    if (added !== null) loom.drafts.drop(draft) // else a toast shows the error, and the text stays
    return added
  }
  const only = () => add(write)
  const grown = (n?: number) =>
    add(async () => {
      if (draft.isMessage) return act.send(loom, draft, n)
      const added = await write()
      if (added !== null) void act.grow(added)
    })
  const keys: Record<string, () => void> = draft.isMessage
    ? { Enter: () => grown(), 'Mod+Enter': () => grown(nSeveralAnswers.peek()), 'Mod+Shift+Enter': only }
    : { 'Shift+Enter': only, 'Mod+Enter': only, 'Mod+Shift+Enter': () => grown() }
  return (
    <div class="editor writer" data-writes={draft.node}>
      {loom.isChat && (
        <Choice
          label="Kind of text"
          values={KINDS}
          chosen={draft.isMessage ? 'message' : 'answer'}
          onChoose={(kind) => loom.drafts.change(draft, { isMessage: kind === 'message' })}
        />
      )}
      <Area
        draft={draft}
        loom={loom}
        label={draft.isMessage ? 'Your next message' : 'Continuation'}
        onKey={(key) => {
          keys[key]?.()
          return key in keys
        }}
      />
      {draft.isStray && (
        <p class="caption warn" role="status">
          The node below which you wrote this was removed. Your text is kept; it will be added below this
          node.
        </p>
      )}
      <Trailing loom={loom} draft={draft} />
      <div class="row editing">
        {draft.isMessage ? (
          <>
            <EditorButton main label="Send" shortcut="Enter" disabled={!canAdd} onClick={() => grown()} />
            <EditorButton
              label={`×${nSeveralAnswers.value}`}
              hint={`Send, and grow ${nSeveralAnswers.value} answers`}
              shortcut="Mod+Enter"
              disabled={!canAdd}
              onClick={() => grown(nSeveralAnswers.peek())}
            />
            <EditorButton
              label="Add without reply"
              shortcut="Mod+Shift+Enter"
              disabled={!canAdd}
              onClick={only}
            />
          </>
        ) : (
          <>
            <EditorButton main label="Add" shortcut="Shift+Enter" disabled={!canAdd} onClick={only} />
            <EditorButton
              label="Add and grow"
              shortcut="Mod+Shift+Enter"
              disabled={!canAdd}
              onClick={() => grown()}
            />
          </>
        )}
        <button type="button" class="button plain" title="Esc" onClick={() => loom.drafts.close()}>
          {draft.text ? 'Close (draft kept)' : 'Close'}
        </button>
        {draft.text && (
          <button type="button" class="button plain" onClick={() => loom.drafts.drop(draft)}>
            Discard
          </button>
        )}
      </div>
    </div>
  )
}

interface EditorButtonProps {
  label: string
  /** The effect, where the label is too short. */
  hint?: string
  shortcut: string
  main?: boolean
  disabled: boolean
  onClick: () => unknown
}

function EditorButton({ label, hint, shortcut, main, disabled, onClick }: EditorButtonProps) {
  return (
    <button
      type="button"
      class={`button ${main ? 'main' : ''}`}
      aria-label={hint}
      title={[hint, keyShown(shortcut)].filter(Boolean).join('  ')}
      disabled={disabled}
      onClick={() => void onClick()}
    >
      {label}
    </button>
  )
}

interface AreaProps extends EditorProps {
  label: string
  /** Return true if it handled the key. */
  onKey: (key: string) => boolean
}

/** As wide as the text, and as high as what is in it. */
function Area({ loom, draft, label, onKey }: AreaProps) {
  const area = useRef<HTMLTextAreaElement>(null)
  // At once: what is typed next is meant for it.
  useLayoutEffect(() => {
    const field = area.current!
    field.focus({ preventScroll: true })
    field.setSelectionRange(field.value.length, field.value.length)
    const spot = draft.kind === 'edit' && draft.text === draft.base ? cursor.peek() : null
    if (spot?.node === draft.node)
      void charIndex(loom, spot, draft.base).then((at) => {
        // If the user has moved, selected or typed, the cursor stays.
        const isUntouched = field.value === draft.base && field.selectionStart === field.value.length
        if (at !== null && isUntouched) field.setSelectionRange(at, at)
      })
    else field.closest('.editor')?.scrollIntoView({ block: 'nearest' })
  }, [])
  useLayoutEffect(() => {
    if (CSS.supports('field-sizing', 'content')) return
    const fit = () => fitHeight(area.current!)
    fit()
    addEventListener('resize', fit)
    return () => removeEventListener('resize', fit)
  }, [draft.text])
  return (
    <textarea
      ref={area}
      class="area"
      rows={1}
      enterkeyhint={draft.isMessage ? 'send' : 'enter'}
      aria-label={label}
      placeholder={label}
      spellcheck
      dir="auto"
      value={draft.text}
      onInput={(event) => loom.drafts.change(draft, { text: event.currentTarget.value })}
      onKeyDown={(event) => {
        if (event.key === 'Escape') {
          event.preventDefault()
          loom.drafts.close()
          return
        }
        const mod = event.ctrlKey || event.metaKey
        const key = `${mod ? 'Mod+' : ''}${event.shiftKey ? 'Shift+' : ''}${event.key.length === 1 ? event.key.toLowerCase() : event.key}`
        if (onKey(key)) event.preventDefault()
      }}
    />
  )
}

/** As high as its text, where the browser does not see to that. What is around it stays where it is. */
function fitHeight(field: HTMLTextAreaElement): void {
  const pane = field.closest('.reading')
  const top = pane?.scrollTop ?? 0
  field.style.height = 'auto'
  const border = field.offsetHeight - field.clientHeight
  field.style.height = `${field.scrollHeight + border}px`
  if (pane) pane.scrollTop = top
}

/** Most tokenizers put the blank at the beginning of a word: one at the end stands alone. */
function Trailing({ loom, draft }: EditorProps) {
  const isRaw = loom.info.value.chat_template_used !== true
  if (!isRaw || !/[^\S\n]$/.test(draft.text)) return null
  return <p class="caption warn">The text ends with a space. Most models continue better without it.</p>
}

/** Tokens that are recomputed after a node is changed in place. */
function tokensBelow(loom: OpenLoom, node: number): number {
  let total = 0
  for (const below of loom.tree.preorder(node))
    if (below !== node) total += loom.tree.get(below)?.n_tokens ?? 0
  return total
}

function messageOf(error: ApiError, isGrowing: boolean): string {
  if (error.code === 'revision_mismatch' && isGrowing)
    return 'This node is still growing. Your text is kept: save it when the growth has ended.'
  if (error.code === 'revision_mismatch')
    return 'This node was changed meanwhile. Your text is kept: save it as a sibling, or save it again in place to replace the current text.'
  if (error.isAway) return 'The server does not answer. Your text is kept: save it again later.'
  return [error.message, error.hint].filter(Boolean).join(' · ')
}

/** A draft that waits at the current node. */
export function Waiting({ loom, draft }: EditorProps) {
  const chars = formatCount(Array.from(draft.text).length)
  return (
    <p class="caption waiting row">
      <span>
        Draft of {draft.kind === 'edit' ? 'an edit' : 'a text'}, {chars} characters.
      </span>
      <button type="button" class="button plain" onClick={() => loom.drafts.begin(draft)}>
        Continue editing
      </button>
      <button type="button" class="button plain" onClick={() => loom.drafts.drop(draft)}>
        Discard
      </button>
    </p>
  )
}
