import { ORDERS, type Order } from '../../model/sibling_order'
import { siblingOrder } from '../../state/view'

/** The order of siblings in every view of the tree. */
export function SortSiblings() {
  return (
    <select
      class="field sort-siblings"
      aria-label="Sort siblings by"
      title="Sort siblings by"
      value={siblingOrder.value}
      onChange={(event) => {
        siblingOrder.value = event.currentTarget.value as Order
      }}
    >
      {Object.entries(ORDERS).map(([value, label]) => (
        <option key={value} value={value}>
          {label}
        </option>
      ))}
    </select>
  )
}
