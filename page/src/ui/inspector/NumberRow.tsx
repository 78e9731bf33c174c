/** A setting that is a number: its name, its field, and what is wrong with it. */
import type { ComponentChildren } from 'preact'
import { useEffect, useState } from 'preact/hooks'
import { NUMBER_FIELDS, type NumberSetting, readNumber } from '../../model/fields'
import { fieldErrors, limits, set, setFieldError } from '../../state/settings'

interface NumberRowProps {
  name: NumberSetting
  /** null: nothing is set. */
  value: number | null
  children?: ComponentChildren
}

export function NumberRow({ name, value, children }: NumberRowProps) {
  const field = NUMBER_FIELDS[name]
  const [draft, setDraft] = useState<string | null>(null)
  const wrong = fieldErrors.value.get(name)
  useEffect(() => setDraft(null), [value])
  useEffect(
    () => () => {
      if (fieldErrors.peek().has(name)) setFieldError(name, null)
    },
    [],
  )
  const shown = draft ?? (value === null ? '' : String(value))
  const read = (text: string) => {
    setDraft(text)
    if (text.trim() === '' && field.empty !== undefined) {
      set({ [name]: null })
      return
    }
    const result = readNumber(name, text, limits.peek())
    if (typeof result === 'string') setFieldError(name, result)
    else set({ [name]: result.value })
  }
  const step = (event: KeyboardEvent) => {
    const by = { ArrowUp: 1, ArrowDown: -1 }[event.key]
    if (by === undefined || event.altKey || name === 'seed') return
    event.preventDefault()
    const next = Number(((value ?? 0) + by * field.step * (event.shiftKey ? 10 : 1)).toFixed(6))
    const result = readNumber(name, String(next), limits.peek())
    if (typeof result !== 'string') set({ [name]: result.value })
    setDraft(null)
  }
  return (
    <div class="setting">
      <div class="setting-row">
        <label for={`set-${name}`} title={field.hint} class="grow cut">
          {field.label}
        </label>
        <ResetMark
          label={field.label}
          neutral={String(field.neutral ?? field.empty)}
          isNeutral={field.sampler === undefined || value === field.neutral}
          onReset={() => set({ [name]: field.neutral })}
        />
        {children}
        <input
          id={`set-${name}`}
          class={`field setting-field ${name === 'seed' ? 'is-wide' : ''}`}
          inputMode={field.isInteger ? 'numeric' : 'decimal'}
          autocomplete="off"
          spellcheck={false}
          value={shown}
          placeholder={field.empty}
          aria-invalid={wrong !== undefined}
          aria-describedby={wrong === undefined ? undefined : `wrong-${name}`}
          onInput={(event) => read(event.currentTarget.value)}
          onKeyDown={step}
          onFocus={(event) => event.currentTarget.select()}
        />
      </div>
      {wrong !== undefined && (
        <p class="error caption setting-error" id={`wrong-${name}`}>
          {wrong}
        </p>
      )}
    </div>
  )
}

interface ResetMarkProps {
  label: string
  /** The neutral value in words. */
  neutral: string
  isNeutral: boolean
  onReset: () => void
}

/** The mark of a setting that is not neutral; a click resets it. */
export function ResetMark({ label, neutral, isNeutral, onReset }: ResetMarkProps) {
  if (isNeutral) return null
  return (
    <button
      type="button"
      class="setting-reset"
      title={`Reset to ${neutral}`}
      aria-label={`${label}: reset to ${neutral}`}
      onClick={onReset}
    />
  )
}
