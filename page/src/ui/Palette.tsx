/** All commands by name. */
import { useState } from 'preact/hooks'
import { bindings, shown } from '../state/keys'
import { closeOverlay, Dialog } from './Overlay'

export function Palette() {
  const [query, setQuery] = useState('')
  const [at, setAt] = useState(0)
  const words = query.toLowerCase().split(/\s+/).filter(Boolean)
  const found = bindings
    .filter((each) => each.id !== 'palette')
    .filter((each) => words.every((word) => `${each.label} ${each.group}`.toLowerCase().includes(word)))
  const chosen = Math.min(at, found.length - 1)
  const take = (i: number) => {
    const one = found[i]
    if (!one || !(one.can?.() ?? true)) return
    closeOverlay()
    // Once the focus is back where it was.
    setTimeout(() => one.run())
  }
  return (
    <Dialog title="All commands" width={520} class="palette">
      <input
        class="field"
        placeholder="What to do"
        aria-label="What to do"
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        aria-activedescendant={found[chosen] ? `cmd-${found[chosen].id}` : undefined}
        value={query}
        onInput={(event) => {
          setQuery(event.currentTarget.value)
          setAt(0)
        }}
        onKeyDown={(event) => {
          if (event.key === 'ArrowDown') setAt(Math.min(chosen + 1, found.length - 1))
          else if (event.key === 'ArrowUp') setAt(Math.max(chosen - 1, 0))
          else if (event.key === 'Enter') take(chosen)
          else return
          event.preventDefault()
        }}
      />
      <ul id="palette-list" role="listbox" aria-label="Commands" class="palette-list">
        {found.map((each, i) => (
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
      {!found.length && <p class="muted">No command has these words.</p>}
    </Dialog>
  )
}
