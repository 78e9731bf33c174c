/** Copies a block of code. */
import { useState } from 'preact/hooks'
import { failed } from '../../state/toasts'

export function Copy({ text }: { text: string }) {
  const [isDone, setDone] = useState(false)
  const copy = () => {
    navigator.clipboard.writeText(text).then(() => setDone(true), failed)
  }
  return (
    <button type="button" class="button plain caption" onClick={copy}>
      {isDone ? 'Copied' : 'Copy'}
    </button>
  )
}
