/** The menu of a node. */
import { ROOT } from '../../model/tree'
import { plural } from '../../model/words'
import * as act from '../../state/actions'
import { keyFor, run } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly } from '../../state/session'
import { settings } from '../../state/settings'
import { Menu, type MenuItem } from '../Menu'
import { labelling } from './Bookmarks'
import { beginMove, fold, menu, select, showSame } from './rowEvents'
import { rowsOf } from './rows'

export function RowMenu({ loom }: { loom: OpenLoom }) {
  const request = menu.value
  if (!request || !loom.tree.get(request.node)) return null
  return (
    <Menu
      key={`${request.node}/${request.x}/${request.y}`}
      label="Node"
      items={itemsOf(loom, request.node)}
      at={request}
      onClose={() => (menu.value = null)}
    />
  )
}

function itemsOf(loom: OpenLoom, node: number): MenuItem[] {
  const { tree } = loom
  const target = tree.get(node)!
  const outline = rowsOf(loom).outline.peek()
  const row = outline.rows[outline.rowOf(node)]
  const nChildren = tree.children(node).length
  const isRoot = node === ROOT
  const isSame = tree.siblings(node).some((each) => each !== node && tree.get(each)?.text === target.text)
  /** A command of the table of keys that is about the current node. */
  const there = (command: string) => () => {
    loom.navigate(node)
    run(command)
  }
  const items: (MenuItem | false)[] = [
    target.growing === true && { label: 'Stop', key: keyFor('stop'), run: () => void act.stopBranch(node) },
    {
      label: `Grow ${plural(settings.peek().n, 'branch', 'branches')}`,
      key: keyFor('grow'),
      disabled: isReadOnly.peek(),
      run: () => void act.grow(node),
    },
    { label: 'Write a continuation', key: keyFor('write'), run: there('write') },
    { label: 'Edit as a new sibling', key: keyFor('edit'), run: there('edit'), disabled: isRoot },
    {
      label: target.bookmark == null ? 'Bookmark' : 'Remove the bookmark',
      key: keyFor('bookmark'),
      run: () => void act.bookmark(node),
      begins: true,
    },
    target.bookmark != null && { label: 'Label the bookmark', run: () => (labelling.value = node) },
    {
      label: loom.selected.peek().has(node) ? 'Deselect' : 'Select',
      key: keyFor('select'),
      run: () => select(loom, node),
    },
    {
      label: 'Pin or unpin the KV cache of its path',
      disabled: isReadOnly.peek() || target.growing === true,
      run: () => void act.pin(node),
    },
    node !== loom.top && {
      label: 'Show only this subtree',
      key: keyFor('hoist'),
      run: () => act.hoist(node),
      begins: true,
    },
    loom.hoisted.peek().length > 0 && {
      label: 'Leave the subtree',
      key: keyFor('unhoist'),
      run: act.unhoist,
    },
    row !== undefined &&
      row.isFolded !== null && {
        label: row.isFolded ? 'Unfold' : 'Fold',
        key: keyFor('collapse'),
        run: () => fold(loom, node),
      },
    isSame &&
      nChildren === 0 && {
        label: row?.same.length ? 'Show equal siblings one by one' : 'Show equal siblings as one row',
        run: () => showSame(loom, node),
      },
    !isRoot && {
      label: 'Move below another node',
      key: keyFor('move'),
      run: () => beginMove(loom, node),
      begins: true,
    },
    !isRoot && { label: 'Merge with the parent', key: keyFor('merge'), run: () => void act.merge(node) },
    !isRoot && { label: 'Remove', key: keyFor('remove'), run: () => void act.remove(node), begins: true },
    nChildren > 0 && {
      label: 'Remove the children',
      key: keyFor('remove-children'),
      run: () => void act.remove(node, 'children'),
    },
    tree.siblings(node).length > 1 && {
      label: 'Remove the siblings',
      key: keyFor('remove-siblings'),
      run: () => void act.remove(node, 'siblings'),
    },
    !isRoot && { label: 'Keep only this path', run: () => void act.remove(node, 'others') },
  ]
  return items.filter((each) => each !== false)
}
