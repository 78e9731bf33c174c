/** Selecting many nodes at once. */
import { ListChecks } from 'lucide-preact'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { MenuButton, type MenuItem } from '../Menu'
import { select, selectAll } from './rowEvents'

export function SelectMenu({ loom }: { loom: OpenLoom }) {
  return <MenuButton icon={ListChecks} label="Select" items={() => itemsOf(loom)} />
}

function itemsOf(loom: OpenLoom): MenuItem[] {
  const node = loom.current.peek()
  const selected = loom.selected.peek()
  return [
    { label: 'All leaves', key: keyFor('select-leaves'), run: () => selectAll(loom, 'leaves') },
    { label: 'All bookmarks', run: () => selectAll(loom, 'bookmarks') },
    {
      label: selected.has(node) ? 'Deselect this node' : 'This node',
      key: keyFor('select'),
      run: () => select(loom, node),
    },
    {
      label: 'None',
      key: 'Esc',
      disabled: !selected.size,
      run: () => (loom.selected.value = new Set()),
      begins: true,
    },
  ]
}
