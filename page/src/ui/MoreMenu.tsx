/** Commands that do not fit into the bar of a narrow screen. */
import { Ellipsis } from 'lucide-preact'
import { keyFor, run } from '../state/keys'
import { MenuButton } from './Menu'

const ITEMS = {
  new: 'New loom',
  search: 'Search',
  import: 'Import',
  export: 'Export',
  gauge: 'Memory',
  look: 'Appearance',
  palette: 'All commands',
  help: 'Keyboard shortcuts',
}

const items = () =>
  Object.entries(ITEMS).map(([command, label]) => ({
    label,
    key: keyFor(command),
    run: () => void run(command),
  }))

export function MoreMenu() {
  return (
    <span class="narrow-only">
      <MenuButton icon={Ellipsis} label="More" items={items} />
    </span>
  )
}
