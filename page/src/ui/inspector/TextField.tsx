/** A text field that saves when it loses the focus; until then changes elsewhere do not overwrite it. */
import { useEffect, useRef, useState } from 'preact/hooks'

interface TextFieldProps {
  kind: 'input' | 'textarea'
  label: string
  placeholder: string
  /** The saved value. */
  value: string
  disabled?: boolean
  rows?: number
  onSave: (text: string) => void
}

export function TextField({
  kind: Field,
  label,
  placeholder,
  value,
  disabled,
  rows = 3,
  onSave,
}: TextFieldProps) {
  /** null: the user has not typed. */
  const [typed, setTyped] = useState<string | null>(null)
  const sent = useRef<string | null>(null)
  const save = () => {
    if (typed === null || typed === value || typed === sent.current) return
    sent.current = typed
    onSave(typed)
  }
  // Navigation in the tree also leaves the field.
  const leave = useRef(save)
  leave.current = save
  useEffect(() => () => leave.current(), [])
  // The saved value has arrived.
  useEffect(() => setTyped((now) => (now === value ? null : now)), [value])
  return (
    <Field
      class="field"
      {...(Field === 'textarea' ? { rows } : { maxLength: 200 })}
      aria-label={label}
      placeholder={placeholder}
      disabled={disabled}
      value={typed ?? value}
      onInput={(event) => {
        sent.current = null
        setTyped(event.currentTarget.value)
      }}
      onBlur={save}
      onKeyDown={(event) => {
        if (event.key !== 'Enter') return
        if (Field === 'textarea' && !event.metaKey && !event.ctrlKey) return
        event.stopPropagation()
        event.currentTarget.blur()
      }}
    />
  )
}
