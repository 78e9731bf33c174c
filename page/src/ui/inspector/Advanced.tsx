/** Settings that few calls need: stop texts, and what a branch may say. */
import { X } from 'lucide-preact'
import { useEffect, useState } from 'preact/hooks'
import { type ConstraintKind, KINDS, readConstraint, readStop, writeStop } from '../../model/fields'
import { fault, faults, type Settings, set } from '../../state/settings'
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
          placeholder={stop.length ? 'another text' : 'a text, as \\n\\n'}
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

const HINTS: Record<ConstraintKind, string> = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}}',
  regex: '[A-Z][a-z]+( [a-z]+)*\\.',
  choices: 'yes\nno',
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
    const found = readConstraint({ kind, text })
    if (typeof found === 'string') fault('constraint', found)
  }
  return (
    <div class="figure">
      <div class="figure-row">
        <label for="set-constraint" class="grow cut" title="Every branch has this form, token by token.">
          Form
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
