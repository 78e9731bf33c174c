/** The theme, and the size and width of the text. */
import type { Signal } from '@preact/signals'
import { TEXT_SIZES, TEXT_WIDTHS, THEMES, textSize, textWidth, theme } from '../state/view'
import { Choice } from './Choice'
import { Dialog } from './Dialog'

const capital = (word: string) => word[0]!.toUpperCase() + word.slice(1)

export function Appearance() {
  return (
    <Dialog title="Appearance" width={420}>
      <div class="column look">
        <Setting label="Theme" values={THEMES} of={theme} />
        <Setting label="Text size" values={TEXT_SIZES} of={textSize} />
        <Setting label="Text width" values={TEXT_WIDTHS} of={textWidth} />
        <p class="look-sample">The quick brown fox jumps over the lazy dog.</p>
      </div>
    </Dialog>
  )
}

function Setting<Value extends string>(props: {
  label: string
  values: readonly Value[]
  of: Signal<Value>
}) {
  return (
    <div class="row">
      <span class="grow">{props.label}</span>
      <Choice
        label={props.label}
        values={props.values.map((each) => ({ value: each, label: capital(each) }))}
        chosen={props.of.value}
        onChoose={(value) => {
          props.of.value = value
        }}
      />
    </div>
  )
}
