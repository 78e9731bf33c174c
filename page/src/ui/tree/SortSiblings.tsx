import { ArrowDownWideNarrow } from 'lucide-preact'
import { ORDERS, type Order } from '../../model/sibling_order'
import { siblingOrder } from '../../state/view'

/** The order of siblings in every view of the tree: an icon over the platform's list. */
export function SortSiblings() {
  return (
    <span class="icon-button sort-siblings" data-on={siblingOrder.value !== 'grown'}>
      <ArrowDownWideNarrow size={16} aria-hidden />
      <select
        aria-label="Sort siblings by"
        title={`Sort siblings by: ${ORDERS[siblingOrder.value]}`}
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
    </span>
  )
}
