/** The beginning: one text, one button. */
import { useState } from 'preact/hooks'
import { begin } from '../../state/actions'
import { linkTo, looms } from '../../state/session'
import { settings } from '../../state/settings'
import { TextButton } from '../Button'
import './first-run.css'

export function FirstRun({ missing }: { missing: { name: string; error: string } | null }) {
  const [prompt, setPrompt] = useState('Tell me a story about a fox.')
  return (
    <main class="first-run">
      {missing && <p class="error">{missing.error}</p>}
      <h1>What should it begin with?</h1>
      <form
        onSubmit={(event) => {
          event.preventDefault()
          void begin(prompt, { template: true, grow: {} })
        }}
      >
        <textarea
          class="field"
          rows={4}
          value={prompt}
          onInput={(event) => setPrompt(event.currentTarget.value)}
        />
        <TextButton kind="main" type="submit">
          Grow {settings.value.n} branches
        </TextButton>
      </form>
      <ul>
        {(looms.value ?? []).map((each) => (
          <li key={each.id}>
            <a href={linkTo(each.name)}>{each.name}</a>
          </li>
        ))}
      </ul>
    </main>
  )
}
