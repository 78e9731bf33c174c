/** The text that leads to the current node, and what grows from it. */
import type { OpenLoom } from '../../state/loom'
import './reading.css'

export function Reading({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const path = loom.tree.path(loom.current.value)
  return (
    <div class="reading">
      <p class="text">
        {path.map((each) => (
          <span key={each}>{loom.tree.get(each)?.text}</span>
        ))}
      </p>
      <ul>
        {[...loom.lanes.value.values()].map((lane) => {
          lane.version.value
          return <li key={lane.node}>{lane.text}</li>
        })}
      </ul>
    </div>
  )
}
