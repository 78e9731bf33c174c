/** The open loom's title; a double click, or Enter, renames it. */
import { useRef, useState } from 'preact/hooks'
import { titleOf } from '../../model/words'
import { rename } from '../../state/actions'
import type { OpenLoom } from '../../state/loom'

export function LoomTitle({ loom }: { loom: OpenLoom }) {
  const [isEditing, setEditing] = useState(false)
  const button = useRef<HTMLButtonElement>(null)
  const isOver = useRef(false)
  const name = titleOf(loom.info.value)
  const edit = () => {
    isOver.current = false
    setEditing(true)
  }
  const end = async (to: string | null) => {
    if (isOver.current) return
    isOver.current = true
    if (to && to !== name && !(await rename(to))) {
      isOver.current = false
      return
    }
    setEditing(false)
    setTimeout(() => button.current?.focus())
  }
  if (!isEditing)
    return (
      <h1 class="loom-title cut">
        <button
          ref={button}
          type="button"
          class="button plain"
          title="Double-click or press Enter to rename"
          onDblClick={edit}
          onKeyDown={(event) => {
            if (event.key !== 'Enter') return
            event.preventDefault()
            event.stopPropagation()
            edit()
          }}
        >
          <span class="cut" dir="auto">
            {name}
          </span>
        </button>
      </h1>
    )
  return (
    <form
      class="loom-title"
      onSubmit={(event) => {
        event.preventDefault()
        const field = event.currentTarget.elements.namedItem('name') as HTMLInputElement
        void end(field.value.trim())
      }}
    >
      <input
        class="field"
        name="name"
        aria-label="Name of the loom"
        maxLength={200}
        defaultValue={name}
        ref={(field) => {
          if (field && document.activeElement !== field) field.select()
        }}
        onBlur={(event) => void end(event.currentTarget.value.trim())}
        onKeyDown={(event) => event.key === 'Escape' && void end(null)}
      />
    </form>
  )
}
