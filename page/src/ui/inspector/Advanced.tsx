/** The settings that are not numbers. */
import { X } from 'lucide-preact'
import { useEffect, useState } from 'preact/hooks'
import { ApiError, api } from '../../api/client'
import {
  type ConstraintKind,
  DRY_BREAKERS,
  KINDS,
  OTHER_FIELDS,
  readBias,
  readConstraint,
  readListed,
  readStop,
  type TextsSetting,
  type TokenIdsSetting,
  writeStop,
} from '../../model/fields'
import { showWhitespace } from '../../model/words'
import { model } from '../../state/session'
import { fieldErrors, isSame, type Settings, set, setFieldError } from '../../state/settings'
import { sentence } from '../../state/toasts'
import { IconButton } from '../Button'
import { ResetMark } from './NumberRow'

interface ListFieldProps {
  name: TextsSetting | TokenIdsSetting
  values: readonly (string | number)[]
  placeholder: string
}

/** A setting that is a list of texts or token ids: a field that adds some, and a row for each. */
export function ListField({ name, values, placeholder }: ListFieldProps) {
  const { label, hint } = OTHER_FIELDS[name]
  const kind = name === 'stop_token_ids' || name === 'allowed_token_ids' ? 'id' : 'text'
  const wrong = fieldErrors.value.get(name)
  useEffect(() => () => setFieldError(name, null), [])
  const add = (field: HTMLInputElement) => {
    const added = readListed(name, field.value, model.peek()?.n_vocab ?? 2 ** 31)
    if (typeof added === 'string') return setFieldError(name, added)
    setFieldError(name, null)
    const all = [...new Set([...values, ...added])]
    if (all.length > values.length) set({ [name]: all })
    field.value = ''
  }
  return (
    <div class="setting">
      <div class="setting-row">
        <label for={`set-${name}`} class="grow cut" title={hint}>
          {label}
        </label>
        {name === 'dry_sequence_breakers' && (
          <ResetMark
            label={label}
            neutral={DRY_BREAKERS.map(writeStop).join(' ')}
            isNeutral={isSame(values, DRY_BREAKERS)}
            onReset={() => set({ [name]: [...DRY_BREAKERS] })}
          />
        )}
        <input
          id={`set-${name}`}
          class="field setting-field is-wide is-text"
          autocomplete="off"
          spellcheck={false}
          placeholder={values.length ? `another ${kind}` : placeholder}
          aria-invalid={wrong !== undefined}
          aria-describedby={wrong === undefined ? undefined : `wrong-${name}`}
          onKeyDown={(event) => {
            if (event.key !== 'Enter') return
            event.preventDefault()
            add(event.currentTarget)
          }}
          onBlur={(event) => add(event.currentTarget)}
        />
      </div>
      {values.length > 0 && (
        <ul class="set-texts" aria-label={`${label}: ${kind}s`}>
          {values.map((each) => (
            <li key={each} class="row">
              <code class="grow cut">{writeStop(String(each))}</code>
              <IconButton
                icon={X}
                label={`${label}: remove ${writeStop(String(each))}`}
                onClick={() => set({ [name]: values.filter((one) => one !== each) })}
              />
            </li>
          ))}
        </ul>
      )}
      {wrong !== undefined && (
        <p class="error caption setting-error" id={`wrong-${name}`}>
          {wrong}
        </p>
      )}
    </div>
  )
}

/** A setting that is on or off. */
export function CheckRow({ name, value }: { name: 'temperature_first'; value: boolean }) {
  const { label, hint } = OTHER_FIELDS[name]
  const wrong = fieldErrors.value.get(name)
  return (
    <div class="setting">
      <div class="setting-row">
        <label for={`set-${name}`} class="grow cut" title={hint}>
          {label}
        </label>
        <ResetMark label={label} neutral="off" isNeutral={!value} onReset={() => set({ [name]: false })} />
        <input
          id={`set-${name}`}
          type="checkbox"
          checked={value}
          onChange={(event) => set({ [name]: event.currentTarget.checked })}
        />
      </div>
      {wrong !== undefined && <p class="error caption setting-error">{wrong}</p>}
    </div>
  )
}

/** How likely single tokens are: a token, or #id, and a number. */
export function Biases({ biases }: { biases: Settings['logit_bias'] }) {
  const [token, setToken] = useState('')
  const [value, setValue] = useState('')
  const wrong = fieldErrors.value.get('logit_bias')
  useEffect(() => () => setFieldError('logit_bias', null), [])
  const add = async () => {
    const bias = readBias(value)
    if (token === '') return setFieldError('logit_bias', null)
    if (bias === null) return setFieldError('logit_bias', 'A number, “ban” or “only”.')
    const result = await tokenOf(token, model.peek()?.id ?? null)
    if (typeof result === 'string') return setFieldError('logit_bias', result)
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
    <div class="setting">
      <div class="setting-row">
        <label for="set-bias" class="grow cut" title={OTHER_FIELDS.logit_bias.hint}>
          {OTHER_FIELDS.logit_bias.label}
        </label>
        <input
          id="set-bias"
          class="field setting-field"
          autocomplete="off"
          spellcheck={false}
          placeholder="token, #id"
          aria-invalid={wrong !== undefined}
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
          onKeyDown={onEnter}
        />
        <input
          class="field setting-field is-narrow"
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
        <ul class="set-texts" aria-label="Token biases">
          {biases.map((each) => (
            <li key={each.id} class="row">
              <code class="grow cut" title={`#${each.id}`}>
                {showWhitespace(each.text)}
              </code>
              <span>{each.bias}</span>
              <IconButton
                icon={X}
                label={`Remove the bias of ${showWhitespace(each.text)}`}
                onClick={() => set({ logit_bias: biases.filter((one) => one.id !== each.id) })}
              />
            </li>
          ))}
        </ul>
      )}
      {wrong !== undefined && <p class="error caption setting-error">{wrong}</p>}
    </div>
  )
}

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
      return `“${showWhitespace(text)}” is ${token_ids.length} tokens; enter one token.`
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
  const wrong = fieldErrors.value.get('constraint')
  useEffect(() => {
    if (constraint && constraint.text !== draft) setDraft(constraint.text)
  }, [constraint])
  useEffect(() => () => setFieldError('constraint', null), [])
  const read = (kind: ConstraintKind, text: string) => {
    setDraft(text)
    set({ constraint: { kind, text } })
    const result = readConstraint({ kind, text })
    if (typeof result === 'string') setFieldError('constraint', result)
  }
  return (
    <div class="setting">
      <div class="setting-row">
        <label for="set-constraint" class="grow cut" title={OTHER_FIELDS.constraint.hint}>
          {OTHER_FIELDS.constraint.label}
        </label>
        <select
          id="set-constraint"
          class="field setting-field is-wide"
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
      {wrong !== undefined && <p class="error caption setting-error">{wrong}</p>}
    </div>
  )
}
