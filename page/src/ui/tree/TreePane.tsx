/** The tree of the loom. */

import { oneLine } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import './tree.css'

export function TreePane({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const rows = [...loom.tree.preorder(loom.top)].slice(0, 200)
  return (
    <ul class="outline">
      {rows.map((each) => (
        <li
          key={each}
          style={{ paddingLeft: `${12 + 16 * (loom.tree.path(each).length - 1)}px` }}
          aria-current={each === loom.current.value}
          onClick={() => loom.go(each)}
        >
          {oneLine(loom.tree.get(each)?.text ?? '', 60)}
        </li>
      ))}
    </ul>
  )
}
