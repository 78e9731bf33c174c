/** One of a few: side by side, as radio buttons are. */
import { useId } from 'preact/hooks'
import './choice.css'

export interface Option<Value> {
  value: Value
  label: string
  disabled?: boolean
  title?: string
}

export function Choice<Value extends string>(props: {
  label: string
  values: readonly Option<Value>[]
  chosen: Value
  onChoose: (value: Value) => void
}) {
  const name = useId()
  return (
    <div class="choice row" role="radiogroup" aria-label={props.label}>
      {props.values.map((each) => (
        <label key={each.value} title={each.title}>
          <input
            type="radio"
            name={name}
            value={each.value}
            checked={each.value === props.chosen}
            disabled={each.disabled}
            onChange={() => props.onChoose(each.value)}
          />
          <span>{each.label}</span>
        </label>
      ))}
    </div>
  )
}
