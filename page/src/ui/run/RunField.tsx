/** A field of a search: its name, its field, and what is wrong with it. */
interface RunFieldProps {
  name: string
  label: string
  placeholder: string
  hint: string
  wrong: string
  value: string
  /** A text instead of a number. */
  isText?: boolean
  onInput: (value: string) => void
}

export function RunField({
  name,
  label,
  placeholder,
  hint,
  wrong,
  value,
  isText = false,
  onInput,
}: RunFieldProps) {
  return (
    <div class="run-field">
      <label for={`run-${name}`} title={hint}>
        {label}
      </label>
      <input
        id={`run-${name}`}
        class="field"
        inputMode={isText ? 'text' : 'decimal'}
        spellcheck={false}
        autocomplete="off"
        placeholder={placeholder}
        value={value}
        aria-invalid={wrong !== ''}
        aria-describedby={wrong ? `run-${name}-wrong` : undefined}
        onInput={(event) => onInput(event.currentTarget.value)}
      />
      {wrong && (
        <p class="error caption" id={`run-${name}-wrong`}>
          {wrong}
        </p>
      )}
    </div>
  )
}
