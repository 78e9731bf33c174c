/** What a loom begins with: a prompt that stands there already, samples, and the button. */
import { useLayoutEffect, useRef, useState } from 'preact/hooks'
import { samples } from '../../model/samples'
import { plural } from '../../model/words'
import { begin } from '../../state/actions'
import { remembered } from '../../state/kept'
import { isMac } from '../../state/keys'
import { isAway, model } from '../../state/session'
import { settings } from '../../state/settings'
import { TextButton } from '../Button'
import { Choice } from '../Choice'
import { ModelChip } from '../model/ModelChip'
import { ModelState } from '../model/ModelState'

const asChat = remembered('asChat', true)

export function PromptForm() {
  const using = model.value
  const hasTemplate = using?.has_chat_template ?? false
  const isChat = hasTemplate && asChat.value
  const { first, others } = samples(using, isChat)
  /** null: nobody has typed; the sample of the model stands there. */
  const [typed, setTyped] = useState<string | null>(null)
  const [isBusy, setBusy] = useState(false)
  const box = useRef<HTMLTextAreaElement>(null)
  const prompt = typed ?? first
  const isReady = using !== null && !isAway.value && !isBusy && prompt.trim() !== ''

  // Selected from the start: what one types takes the sample's place.
  useLayoutEffect(() => {
    if (typed === null) box.current?.select()
  }, [first])

  const grow = async () => {
    if (!isReady) return
    setBusy(true)
    await begin(prompt, { template: isChat, grow: {} })
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
      <h1 id="begin-with">What should it begin with?</h1>
      <textarea
        ref={box}
        aria-labelledby="begin-with"
        rows={3}
        spellcheck={false}
        value={prompt}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== 'Enter' || !(isMac ? event.metaKey : event.ctrlKey)) return
          event.preventDefault()
          void grow()
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
      <div class="row begin">
        <ModelChip />
        {hasTemplate && (
          <Choice
            label="How the model reads it"
            values={[
              { value: 'chat', label: 'Chat', title: 'As what a person says, by the model’s chat template' },
              { value: 'raw', label: 'Raw text', title: 'As it is: the model goes on from its end' },
            ]}
            chosen={isChat ? 'chat' : 'raw'}
            onChoose={(chosen) => {
              asChat.value = chosen === 'chat'
            }}
          />
        )}
        <span class="grow" />
        <kbd class="wide-only">{isMac ? '⌘⏎' : 'Ctrl+⏎'}</kbd>
        <TextButton kind="main" type="submit" disabled={!isReady}>
          Grow {plural(settings.value.n, 'branch', 'branches')}
        </TextButton>
      </div>
      {!using && <ModelState />}
    </form>
  )
}
