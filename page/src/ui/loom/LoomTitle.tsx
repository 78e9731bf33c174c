/** The open loom's name; a double click, or Enter, renames it. */
import { useState } from 'preact/hooks'
import { rename } from '../../state/actions'
import type { OpenLoom } from '../../state/loom'

export function LoomTitle({ loom }: { loom: OpenLoom }) {
  const [isEditing, setEditing] = useState(false)
  const name = loom.info.value.name
  if (!isEditing)
    return (
      <h1 class="loom-title cut">
        <button type="button" class="button plain" title="Rename" onClick={() => setEditing(true)}>
          {name}
        </button>
      </h1>
    )
  return (
    <form
      onSubmit={async (event) => {
        event.preventDefault()
        const field = event.currentTarget.elements.namedItem('name') as HTMLInputElement
        if (field.value === name || (await rename(field.value.trim()))) setEditing(false)
      }}
    >
      <input
        class="field"
        name="name"
        aria-label="Name of the loom"
        defaultValue={name}
        ref={(field) => field?.select()}
        onBlur={() => setEditing(false)}
        onKeyDown={(event) => event.key === 'Escape' && setEditing(false)}
      />
    </form>
  )
}
