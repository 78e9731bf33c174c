/** A loom: what it is, what it holds, what was done to it, and its memory. */
import { useEffect, useState } from 'preact/hooks'
import { api, type Schemas } from '../../api/client'
import { formatCount, numberedTitle, plural, shortName, titleOf } from '../../model/words'
import * as act from '../../state/actions'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, looms, model, models } from '../../state/session'
import { systemOf } from '../../state/system'
import { overlay } from '../../state/view'
import { AuthorNoteEditor } from './AuthorNoteEditor'
import { Facts } from './Facts'
import { History } from './History'
import { moment } from './operations'
import { TextField } from './TextField'
import './node.css'

export function LoomTab({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const { tree } = loom
  const info = loom.info.value
  const kv = useKv(loom)
  let tokens = 0
  let leaves = 0
  for (const node of tree.nodes.values()) {
    tokens += node.n_tokens
    if (!node.children.length) leaves += 1
  }
  const isChat = info.chat_template_used
  return (
    <>
      <section class="part" aria-label="About this loom">
        <NameField loom={loom} key={titleOf(info)} />
        <Facts
          of={[
            { name: 'Model', hint: 'The model of its tokens.', value: shortName(info.model) },
            info.title
              ? { name: 'Address', hint: 'The name in the address and in commands', value: info.name }
              : null,
            { name: 'Kind', value: isChat === null ? '–' : isChat ? 'chat' : 'raw text' },
            info.created ? { name: 'Created', value: moment(info.created), varies: true } : null,
            { name: 'Nodes', value: formatCount(tree.size) },
            { name: 'Leaves', value: formatCount(leaves) },
            {
              name: 'Tokens',
              hint: 'All nodes together; shared text is counted once.',
              value: formatCount(tokens),
            },
            {
              name: 'In KV cache',
              hint: 'Nodes with their full path in the KV cache.',
              value: kv === null ? '–' : kv && `${plural(kv.hot, 'node')}, ${plural(kv.hot_tokens, 'token')}`,
              varies: true,
            },
          ]}
        />
        <p class="loom-prompt">{info.prompt}</p>
      </section>
      <OtherModels loom={loom} />
      {isChat && <SystemPrompt loom={loom} key={`system-${loom.id}`} />}
      <AuthorNoteEditor loom={loom} key={`author-note-${loom.id}`} />
      <section class="part" aria-label="Notes">
        <TextField
          kind="textarea"
          rows={4}
          label="Notes on the loom"
          placeholder="Notes on this loom"
          value={noteOf(info.meta)}
          onSave={(text) => void act.noteLoom(text)}
        />
      </section>
      <section class="part" aria-label="Files">
        <div class="actions">
          <button
            type="button"
            class="button"
            title={keyFor('export')}
            onClick={() => (overlay.value = 'export')}
          >
            Export
          </button>
          <button
            type="button"
            class="button"
            title={keyFor('import')}
            onClick={() => (overlay.value = 'import')}
          >
            Import
          </button>
          <button type="button" class="button" onClick={() => void act.removeLoom(info)}>
            Remove this loom
          </button>
        </div>
      </section>
      <History loom={loom} />
    </>
  )
}

/** A tree belongs to one model's tokens: another model grows it (Generate), or gets a loom of its own. */
function OtherModels({ loom }: { loom: OpenLoom }) {
  const others = models.value.filter((each) => each.state === 'ready' && each.id !== model.value?.id)
  const [wanted, setWanted] = useState<string | null>(null)
  const id = others.find((each) => each.id === wanted)?.id ?? others[0]?.id
  if (id === undefined) return null
  const begin = () => {
    const { prompt, chat_template_used } = loom.info.peek()
    const system = systemOf(loom.info.peek())
    void act.startLoom(prompt, { template: chat_template_used === true, system, model: id, grow: {} })
  }
  return (
    <section class="part" aria-label="Another model">
      <h3>Another model</h3>
      <select
        class="field"
        aria-label="Another model"
        value={id}
        onChange={(event) => setWanted(event.currentTarget.value)}
      >
        {others.map((each) => (
          <option key={each.id} value={each.id}>
            {shortName(each.id)}
          </option>
        ))}
      </select>
      <p class="caption">
        {isReadOnly.value
          ? 'This loom’s model is not loaded. A copy can grow with this one.'
          : 'To grow single branches with it: Generate · Grow with.'}
      </p>
      <div class="actions">
        <button
          type="button"
          class="button"
          title="A new loom with all branches; this one stays as it is"
          onClick={() => void act.copyFor(id)}
        >
          Copy all branches
        </button>
        <button type="button" class="button" title="A new loom with the same prompt" onClick={begin}>
          Same prompt only
        </button>
      </div>
    </section>
  )
}

/** A tree has one system prompt: another one begins a new chat, with the same first message. */
function SystemPrompt({ loom }: { loom: OpenLoom }) {
  const now = systemOf(loom.info.value)
  const [text, setText] = useState(now)
  return (
    <section class="part" aria-label="System prompt">
      <h3>System prompt</h3>
      <textarea
        class="field"
        aria-label="System prompt"
        placeholder="None"
        rows={3}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <div class="actions">
        <button
          type="button"
          class="button"
          title="This chat stays as it is"
          disabled={text.trim() === now || isReadOnly.value}
          onClick={() =>
            void act.startLoom(loom.info.peek().prompt, {
              title: numberedTitle(titleOf(loom.info.peek()), (looms.peek() ?? []).map(titleOf)),
              template: true,
              system: text,
              grow: {},
            })
          }
        >
          New chat with this
        </button>
      </div>
    </section>
  )
}

const noteOf = (meta: Record<string, unknown> | null | undefined): string => {
  const note = meta?.['note']
  return typeof note === 'string' ? note : ''
}

function NameField({ loom }: { loom: OpenLoom }) {
  const name = titleOf(loom.info.value)
  const save = async (field: HTMLInputElement) => {
    const wanted = field.value.trim()
    if (wanted === name || wanted === '' || !(await act.rename(wanted))) field.value = name
  }
  return (
    <input
      class="field"
      aria-label="Name"
      autocomplete="off"
      spellcheck={false}
      maxLength={200}
      defaultValue={name}
      onBlur={(event) => void save(event.currentTarget)}
      onKeyDown={(event) => {
        if (event.key === 'Escape') event.currentTarget.value = name
        if (event.key === 'Enter' || event.key === 'Escape') event.currentTarget.blur()
      }}
    />
  )
}

/** The KV size of the loom, read after each change of its tree. undefined: not loaded yet; null: unknown. */
function useKv(loom: OpenLoom): Schemas['LoomKv'] | null | undefined {
  const [loaded, setLoaded] = useState<{ id: string; kv: Schemas['LoomKv'] | null } | null>(null)
  const { id } = loom
  const rev = loom.tree.rev
  useEffect(() => {
    let isOver = false
    const timer = setTimeout(() => {
      api.loomKv(id).then(
        (kv) => !isOver && setLoaded({ id, kv }),
        () => !isOver && setLoaded({ id, kv: null }), // the panel then shows a dash; no message is needed
      )
    }, 300)
    return () => {
      isOver = true
      clearTimeout(timer)
    }
  }, [id, rev])
  return loaded?.id === id ? loaded.kv : undefined
}
