/** All commands by name. */
import { useState } from 'preact/hooks'
import { type Binding, bindings, shown } from '../state/keys'
import { toast } from '../state/toasts'
import { closeOverlay, Dialog } from './Dialog'

/** The text that a query is compared with: the label, and synonyms from other programs. */
const searchText = ({ label, group, also = '' }: Binding) => `${label} ${group} ${also}`

export function Palette() {
  const [query, setQuery] = useState('')
  const [at, setAt] = useState(0)
  const words = query.toLowerCase().split(/\s+/).filter(Boolean)
  const has = (text: string) => words.every((word) => text.toLowerCase().includes(word))
  const known = bindings.filter((each) => each.id !== 'palette' && has(searchText(each)))
  // The command with exactly this label, then other labels that match, then synonyms.
  const rank = ({ label }: Binding) => (label.toLowerCase() === words.join(' ') ? 0 : has(label) ? 1 : 2)
  const matches = known.sort((a, b) => rank(a) - rank(b))
  const chosen = Math.min(at, matches.length - 1)
  const take = (i: number) => {
    const one = matches[i]
    if (!one) return
    if (!(one.can?.() ?? true)) {
      if (one.why?.()) toast(one.why()!)
      return
    }
    closeOverlay()
    // Once the focus is back where it was.
    setTimeout(() => one.run())
  }
  return (
    <Dialog title="All commands" width={520} class="palette">
      <input
        class="field"
        placeholder="Type a command"
        aria-label="Type a command"
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={matches[chosen] ? `cmd-${matches[chosen].id}` : undefined}
        value={query}
        onInput={(event) => {
          setQuery(event.currentTarget.value)
          setAt(0)
        }}
        onKeyDown={(event) => {
          if (event.key === 'ArrowDown') setAt(Math.min(chosen + 1, matches.length - 1))
          else if (event.key === 'ArrowUp') setAt(Math.max(chosen - 1, 0))
          else if (event.key === 'Enter') take(chosen)
          else return
          event.preventDefault()
        }}
      />
      <ul id="palette-list" role="listbox" aria-label="Commands" class="palette-list">
        {matches.map((each, i) => (
          <li
            key={each.id}
            id={`cmd-${each.id}`}
            role="option"
            aria-selected={i === chosen}
            aria-disabled={!(each.can?.() ?? true)}
            class="row"
            ref={(item) => {
              if (i === chosen) item?.scrollIntoView({ block: 'nearest' })
            }}
            onClick={() => take(i)}
          >
            <span class="grow cut">{each.label}</span>
            <kbd>{shown(each.tree?.[0] ?? each.text?.[0] ?? '')}</kbd>
          </li>
        ))}
      </ul>
      {!matches.length && <p class="muted">No matching commands.</p>}
    </Dialog>
  )
}
