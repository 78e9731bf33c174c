/** The rows of the open loom's tree, and which of its equal siblings are shown one by one. */
import { computed, type ReadonlySignal, signal } from '@preact/signals'
import { Outline } from '../../model/outline'
import { onlyHits } from '../../state/finding'
import type { OpenLoom } from '../../state/loom'

interface Rows {
  outline: ReadonlySignal<Outline>
  unfolded: { value: ReadonlySet<number> }
}
const kept = new WeakMap<OpenLoom, Rows>()

export function rowsOf(loom: OpenLoom): Rows {
  let rows = kept.get(loom)
  if (!rows) {
    const unfolded = signal<ReadonlySet<number>>(new Set())
    const outline = computed(() => {
      loom.tree.version.value
      return new Outline(loom.tree, {
        top: loom.top,
        collapsed: loom.collapsed.value,
        unfolded: unfolded.value,
        only: onlyHits.value,
      })
    })
    rows = { outline, unfolded }
    kept.set(loom, rows)
  }
  return rows
}
