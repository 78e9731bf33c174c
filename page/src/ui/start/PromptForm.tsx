/** The start of a loom: a prompt with a default, samples, and the button. */
import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import type { Model } from '../../api/client'
import { samples } from '../../model/samples'
import { plural, shortName } from '../../model/words'
import { startLoom } from '../../state/actions'
import { isMac } from '../../state/keys'
import { isAway, model, models, newLoomModel } from '../../state/session'
import { asChat, nSeveralAnswers, settings } from '../../state/settings'
import { systemFor, systemPrompts } from '../../state/system'
import { TextButton } from '../Button'
import { Choice } from '../Choice'
import { ModelChip } from '../model/ModelChip'
import { ModelState } from '../model/ModelState'

export function PromptForm() {
  const using = model.value
  const ready = models.value.filter((each) => each.state === 'ready')
  const hasTemplate = using?.has_chat_template ?? false
  const isChat = hasTemplate && asChat.value
  const { first, others } = samples(using, isChat)
  /** null: the user has not typed; the field shows the model's sample. */
  const [typed, setTyped] = useState<string | null>(null)
  const [title, setTitle] = useState('')
  const [isBusy, setBusy] = useState(false)
  const box = useRef<HTMLTextAreaElement>(null)
  const prompt = typed ?? first
  const isReady = using !== null && !isAway.value && !isBusy && prompt.trim() !== ''

  // Selected from the start: what one types takes the sample's place.
  useLayoutEffect(() => {
    if (typed === null) box.current?.select()
  }, [first])

  const grow = async (n?: number) => {
    if (!isReady) return
    setBusy(true)
    const system = isChat ? systemFor(using.id) : ''
    await startLoom(prompt, { title, template: isChat, system, grow: n === undefined ? {} : { n } })
    setBusy(false)
  }
  return (
    <form
      class="prompt-form"
      onSubmit={(event) => {
        event.preventDefault()
        void grow()
      }}
    >
      <p class="what-this-is">
        Weft grows a text or chat as a tree: compare several continuations, continue any of them.
      </p>
      <h1 id="begin-with">Start with a prompt</h1>
      <textarea
        ref={box}
        aria-labelledby="begin-with"
        rows={3}
        spellcheck={false}
        value={prompt}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onKeyDown={(event) => {
          const isMod = isMac ? event.metaKey : event.ctrlKey
          if (event.key !== 'Enter' || event.shiftKey || event.isComposing || !(isMod || isChat)) return
          event.preventDefault()
          void grow(isMod && isChat ? nSeveralAnswers.peek() : undefined)
        }}
      />
      <ul class="samples" aria-label="Samples">
        {others.map((each) => (
          <li key={each}>
            <button
              type="button"
              class="button"
              onClick={() => {
                setTyped(each)
                box.current?.focus()
              }}
            >
              <span class="cut">{each}</span>
            </button>
          </li>
        ))}
      </ul>
      {isChat && <SystemPrompt model={using!.id} />}
      <details class="loom-name">
        <summary>Name</summary>
        <input
          class="field"
          aria-label="Name of the loom"
          placeholder="The first words of the prompt"
          maxLength={200}
          value={title}
          onInput={(event) => setTitle(event.currentTarget.value)}
        />
      </details>
      <div class="row begin">
        {ready.length > 1 ? <ModelChoice models={ready} chosen={using!.id} /> : <ModelChip />}
        {using && (
          <Choice
            label="Chat or raw text"
            values={[
              { value: 'chat', label: 'Chat', disabled: !hasTemplate },
              { value: 'raw', label: 'Raw text' },
            ]}
            chosen={isChat ? 'chat' : 'raw'}
            onChoose={(chosen) => {
              asChat.value = chosen === 'chat'
            }}
          />
        )}
        <span class="grow" />
        <kbd class="wide-only">{isChat ? '⏎' : isMac ? '⌘⏎' : 'Ctrl+⏎'}</kbd>
        {isChat && settings.value.n === 1 && (
          <button
            type="button"
            class="button"
            aria-label={`Send, and grow ${nSeveralAnswers.value} answers`}
            title={`Send, and grow ${nSeveralAnswers.value} answers  ${isMac ? '⌘⏎' : 'Ctrl+⏎'}`}
            disabled={!isReady}
            onClick={() => void grow(nSeveralAnswers.peek())}
          >
            ×{nSeveralAnswers.value}
          </button>
        )}
        <TextButton kind="main" type="submit" disabled={!isReady}>
          {isChat && settings.value.n === 1
            ? 'Send'
            : `Grow ${plural(settings.value.n, 'branch', 'branches')}`}
        </TextButton>
        {using && <p class="caption">{reads(using, isChat)}</p>}
      </div>
      {!using && <ModelState />}
    </form>
  )
}

/** How the model reads the text. */
function reads(model: Model, isChat: boolean): string {
  if (isChat) return 'Chat: the model answers your message.'
  const continues = 'Raw text: the model continues your text from its end, as for stories.'
  return model.has_chat_template
    ? continues
    : `${continues} ${shortName(model.id)} has no chat template, so it cannot answer messages.`
}

function SystemPrompt({ model: id }: { model: string }) {
  const text = systemFor(id)
  return (
    <details class="system-prompt" open={text !== ''}>
      <summary>System prompt</summary>
      <textarea
        aria-label="System prompt"
        placeholder="How should the model answer? Remembered for this model."
        rows={2}
        value={text}
        onInput={(event) => {
          systemPrompts.value = { ...systemPrompts.peek(), [id]: event.currentTarget.value }
        }}
      />
    </details>
  )
}

function ModelChoice({ models, chosen }: { models: readonly Model[]; chosen: string }) {
  return (
    <select
      class="field model-choice"
      aria-label="Model"
      value={chosen}
      onChange={(event) => (newLoomModel.value = event.currentTarget.value)}
    >
      {models.map((each) => (
        <option key={each.id} value={each.id}>
          {shortName(each.id)}
        </option>
      ))}
    </select>
  )
}
