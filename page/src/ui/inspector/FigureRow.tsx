/** A setting that is a number: its name, its field, and what is wrong with it. */
import type { ComponentChildren } from 'preact'
import { useEffect, useState } from 'preact/hooks'
import { FIGURE_FIELDS, type Figure, readFigure } from '../../model/fields'
import { fault, faults, limits, set } from '../../state/settings'

interface FigureRowProps {
  name: Figure
  /** null: nothing is set. */
  value: number | null
  children?: ComponentChildren
}

export function FigureRow({ name, value, children }: FigureRowProps) {
  const field = FIGURE_FIELDS[name]
  const [draft, setDraft] = useState<string | null>(null)
  const wrong = faults.value.get(name)
  useEffect(() => setDraft(null), [value])
  useEffect(
    () => () => {
      if (faults.peek().has(name)) fault(name, null)
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
    const result = readFigure(name, text, limits.peek())
    if (typeof result === 'string') fault(name, result)
    else set({ [name]: result.value })
  }
  const step = (event: KeyboardEvent) => {
    const by = { ArrowUp: 1, ArrowDown: -1 }[event.key]
    if (by === undefined || event.altKey || name === 'seed') return
    event.preventDefault()
    const next = Number(((value ?? 0) + by * field.step * (event.shiftKey ? 10 : 1)).toFixed(6))
    const result = readFigure(name, String(next), limits.peek())
    if (typeof result !== 'string') set({ [name]: result.value })
    setDraft(null)
  }
  const isChanged = field.sampler !== undefined && value !== field.neutral
  const neutral = field.neutral ?? field.empty
  return (
    <div class="figure">
      <div class="figure-row">
        <label for={`set-${name}`} title={field.hint} class="grow cut">
          {field.label}
        </label>
        {isChanged && (
          <button
            type="button"
            class="figure-mark"
            title={`Reset to ${neutral}`}
            aria-label={`${field.label}: reset to ${neutral}`}
            onClick={() => set({ [name]: field.neutral })}
          />
        )}
        {children}
        <input
          id={`set-${name}`}
          class={`field figure-field ${name === 'seed' ? 'is-wide' : ''}`}
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
        <p class="error caption figure-wrong" id={`wrong-${name}`}>
          {wrong}
        </p>
      )}
    </div>
  )
}
