/** Settings that few calls need: stop texts, and what a branch may say. */
import { X } from 'lucide-preact'
import { useEffect, useState } from 'preact/hooks'
import { ApiError, api } from '../../api/client'
import { type ConstraintKind, KINDS, readBias, readConstraint, readStop, writeStop } from '../../model/fields'
import { visible } from '../../model/words'
import { model } from '../../state/session'
import { fault, faults, type Settings, set } from '../../state/settings'
import { sentence } from '../../state/toasts'
import { IconButton } from '../Button'

export function Stops({ stop }: { stop: string[] }) {
  const wrong = faults.value.get('stop')
  const add = (field: HTMLInputElement) => {
    const text = readStop(field.value)
    if (text && !stop.includes(text)) set({ stop: [...stop, text] })
    field.value = ''
  }
  return (
    <div class="figure">
      <div class="figure-row">
        <label
          for="set-stop"
          class="grow cut"
          title="A branch ends with any of these texts; \n is a new line."
        >
          Stop at
        </label>
        <input
          id="set-stop"
          class="field figure-field is-wide"
          autocomplete="off"
          spellcheck={false}
          placeholder={stop.length ? 'another text' : 'text, e.g. \\n\\n'}
          aria-invalid={wrong !== undefined}
          onKeyDown={(event) => {
            if (event.key !== 'Enter') return
            event.preventDefault()
            add(event.currentTarget)
          }}
          onBlur={(event) => add(event.currentTarget)}
        />
      </div>
      {stop.length > 0 && (
        <ul class="stops" aria-label="Stop texts">
          {stop.map((each) => (
            <li key={each} class="row">
              <code class="grow cut">{writeStop(each)}</code>
              <IconButton
                icon={X}
                label={`Do not stop at ${writeStop(each)}`}
                onClick={() => set({ stop: stop.filter((one) => one !== each) })}
              />
            </li>
          ))}
        </ul>
      )}
      {wrong !== undefined && <p class="error caption figure-wrong">{wrong}</p>}
    </div>
  )
}

/** How likely single tokens are: a token, or #id, and a number. */
export function Biases({ biases }: { biases: Settings['logit_bias'] }) {
  const [token, setToken] = useState('')
  const [value, setValue] = useState('')
  const wrong = faults.value.get('logit_bias')
  useEffect(() => () => fault('logit_bias', null), [])
  const add = async () => {
    const bias = readBias(value)
    if (token === '') return fault('logit_bias', null)
    if (bias === null) return fault('logit_bias', 'A number, “ban” or “only”.')
    const result = await tokenOf(token, model.peek()?.id ?? null)
    if (typeof result === 'string') return fault('logit_bias', result)
    set({ logit_bias: [...biases.filter((each) => each.id !== result.id), { ...result, bias }] })
    setToken('')
    setValue('')
  }
  const onEnter = (event: KeyboardEvent) => {
    if (event.key !== 'Enter') return
    event.preventDefault()
    void add()
  }
  return (
    <div class="figure">
      <div class="figure-row">
        <label for="set-bias" class="grow cut" title={BIAS_HINT}>
          Token biases
        </label>
        <input
          id="set-bias"
          class="field figure-field"
          autocomplete="off"
          spellcheck={false}
          placeholder="token, #id"
          aria-invalid={wrong !== undefined}
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
          onKeyDown={onEnter}
        />
        <input
          class="field figure-field is-narrow"
          autocomplete="off"
          aria-label="Bias of the token"
          placeholder="−5"
          title="A number, “ban” or “only”"
          value={value}
          onInput={(event) => setValue(event.currentTarget.value)}
          onKeyDown={onEnter}
          onBlur={() => value !== '' && void add()}
        />
      </div>
      {biases.length > 0 && (
        <ul class="stops" aria-label="Token biases">
          {biases.map((each) => (
            <li key={each.id} class="row">
              <code class="grow cut" title={`#${each.id}`}>
                {visible(each.text)}
              </code>
              <span>{each.bias}</span>
              <IconButton
                icon={X}
                label={`Remove the bias of ${visible(each.text)}`}
                onClick={() => set({ logit_bias: biases.filter((one) => one.id !== each.id) })}
              />
            </li>
          ))}
        </ul>
      )}
      {wrong !== undefined && <p class="error caption figure-wrong">{wrong}</p>}
    </div>
  )
}

const BIAS_HINT =
  'Added to the token’s logit: above 0 it is more likely. “ban” excludes it, “only” excludes all others. Most tokens of words begin with a space.'

/** The token with a text or an #id, or what is wrong with it. */
async function tokenOf(typed: string, model: string | null): Promise<{ id: number; text: string } | string> {
  try {
    if (/^#\d+$/.test(typed)) {
      const id = Number(typed.slice(1))
      return { id, text: (await api.detokenize([id], model)).text }
    }
    const text = readStop(typed)
    const { token_ids } = await api.tokenize(text, model)
    const [id, ...more] = token_ids
    if (id === undefined || more.length)
      return `“${visible(text)}” is ${token_ids.length} tokens; enter one token.`
    return { id, text }
  } catch (error) {
    return error instanceof ApiError ? sentence(error.message) : String(error)
  }
}

const HINTS: Record<ConstraintKind, string> = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}}',
  regex: '[A-Z][a-z]+( [a-z]+)*\\.',
  choices: 'yes\nno',
  gbnf: 'root ::= "yes" | "no"',
  lark: 'start: "yes" | "no"',
}

/** Only texts of a form: one field, and what kind it is of. */
export function ConstraintField({ constraint }: { constraint: Settings['constraint'] }) {
  const kind = constraint?.kind ?? null
  const [draft, setDraft] = useState(constraint?.text ?? '')
  const wrong = faults.value.get('constraint')
  useEffect(() => {
    if (constraint && constraint.text !== draft) setDraft(constraint.text)
  }, [constraint])
  useEffect(() => () => fault('constraint', null), [])
  const read = (kind: ConstraintKind, text: string) => {
    setDraft(text)
    set({ constraint: { kind, text } })
    const result = readConstraint({ kind, text })
    if (typeof result === 'string') fault('constraint', result)
  }
  return (
    <div class="figure">
      <div class="figure-row">
        <label
          for="set-constraint"
          class="grow cut"
          title="Restricts the text of every branch to this format."
        >
          Output format
        </label>
        <select
          id="set-constraint"
          class="field figure-field is-wide"
          value={kind ?? ''}
          onChange={(event) => {
            const chosen = event.currentTarget.value as ConstraintKind | ''
            if (chosen === '') set({ constraint: null })
            else read(chosen, draft)
          }}
        >
          <option value="">Any text</option>
          {Object.entries(KINDS).map(([name, label]) => (
            <option key={name} value={name}>
              {label}
            </option>
          ))}
        </select>
      </div>
      {kind && (
        <textarea
          class="field code"
          rows={kind === 'regex' ? 2 : 5}
          spellcheck={false}
          aria-label={KINDS[kind]}
          aria-invalid={wrong !== undefined}
          placeholder={HINTS[kind]}
          value={draft}
          onInput={(event) => read(kind, event.currentTarget.value)}
        />
      )}
      {wrong !== undefined && <p class="error caption figure-wrong">{wrong}</p>}
    </div>
  )
}
