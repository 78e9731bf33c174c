/** Selecting many nodes at once. */
import { signal } from '@preact/signals'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { Menu } from './Menu'
import { select, selectAll } from './rowEvents'

const place = signal<{ x: number; y: number } | null>(null)

/** Open the menu below a button. */
export function openSelectMenu(event: MouseEvent): void {
  const { left, bottom } = (event.currentTarget as Element).getBoundingClientRect()
  place.value = { x: left, y: bottom }
}

export function SelectMenu({ loom }: { loom: OpenLoom }) {
  if (!place.value) return null
  const isChosen = loom.selected.peek().has(loom.current.peek())
  return (
    <Menu
      label="Select"
      items={[
        { label: 'All leaves', key: keyFor('select-leaves'), run: () => selectAll(loom, 'leaves') },
        { label: 'All bookmarks', run: () => selectAll(loom, 'bookmarks') },
        {
          label: isChosen ? 'Deselect this node' : 'This node',
          key: keyFor('select'),
          run: () => select(loom, loom.current.peek()),
        },
        {
          label: 'None',
          key: 'Esc',
          disabled: !loom.selected.peek().size,
          run: () => (loom.selected.value = new Set()),
          begins: true,
        },
      ]}
      {...place.value}
      onClose={() => (place.value = null)}
    />
  )
}
