/** What a narrow screen has no room for. */
import { Ellipsis } from 'lucide-preact'
import { useRef, useState } from 'preact/hooks'
import { keyFor, run } from '../state/keys'
import { Menu } from './tree/Menu'

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

export function MoreMenu() {
  const [isOpen, setOpen] = useState(false)
  const button = useRef<HTMLButtonElement>(null)
  const at = button.current?.getBoundingClientRect()
  return (
    <span class="narrow-only">
      <button
        ref={button}
        type="button"
        class="icon-button"
        title="More"
        aria-label="More"
        aria-haspopup="menu"
        aria-expanded={isOpen}
        onClick={() => setOpen(!isOpen)}
      >
        <Ellipsis size={16} aria-hidden />
      </button>
      {isOpen && at && (
        <Menu
          label="More"
          x={at.right}
          y={at.bottom + 4}
          onClose={() => setOpen(false)}
          items={Object.entries(ITEMS).map(([command, label]) => ({
            label,
            key: keyFor(command),
            run: () => void run(command),
          }))}
        />
      )}
    </span>
  )
}
