/** The tree of the loom: its outline or its map, with what searches, marks and selects in it. */
import { Bookmark, Search as SearchIcon } from 'lucide-preact'
import { useEffect } from 'preact/hooks'
import * as act from '../../state/actions'
import { closeSearch, hits, isSearching, navigateToHit } from '../../state/finding'
import { provideAll } from '../../state/handlers'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { showTree, treeView } from '../../state/view'
import { IconButton } from '../Button'
import { lazy } from '../lazy'
import { TabPanel, Tabs } from '../Tabs'
import { Bookmarks, hasBookmarks, labelling } from './Bookmarks'
import { Breadcrumbs } from './Breadcrumbs'
import { Moving } from './Moving'
import { OutlineTree } from './OutlineTree'
import {
  beginMove,
  focusTree,
  menu,
  movedNode,
  moveTo,
  moving,
  openMenuAtCurrent,
  select,
  selectAll,
} from './rowEvents'
import { Search } from './Search'
import { growSelected, Selected } from './Selected'
import { SelectMenu } from './SelectMenu'
import { SortSiblings } from './SortSiblings'
import './tree.css'

const useMap = lazy(async () => (await import('./MapView')).MapView)

export function TreePane({ loom }: { loom: OpenLoom }) {
  useEffect(() => takeKeys(loom), [loom])
  const isMap = treeView.value === 'map'
  const nothing =
    hits.value &&
    !hits.value.matches.length &&
    (hits.value.error || 'No results. Try fewer words, or another filter.')
  return (
    <div class="tree-pane">
      <div class="tree-head row">
        <ViewTabs />
        <SortSiblings />
        <IconButton icon={SearchIcon} label="Search" command="search" pressed={isSearching.value} />
        <IconButton icon={Bookmark} label="Bookmarks" command="bookmarks" pressed={hasBookmarks.value} />
        <SelectMenu loom={loom} />
      </div>
      <Search loom={loom} />
      <Bookmarks loom={loom} />
      <Breadcrumbs loom={loom} />
      <Moving loom={loom} />
      <TabPanel id={PANEL} class="tree-view" tab={treeView.value} data-view={treeView.value}>
        {nothing && <p class="tree-nothing">{nothing}</p>}
        <OutlineTree loom={loom} />
        {isMap && <LazyMap loom={loom} />}
      </TabPanel>
      <Selected loom={loom} />
    </div>
  )
}

function LazyMap({ loom }: { loom: OpenLoom }) {
  const MapView = useMap()
  return MapView && <MapView loom={loom} />
}

const PANEL = 'tree-view'

function ViewTabs() {
  const title = (name: string) => `${name}  ${keyFor('map')}`
  return (
    <Tabs
      class="grow"
      label="The tree as"
      tabs={[
        { value: 'outline', label: 'Outline', panel: PANEL, title: title('Outline') },
        { value: 'map', label: 'Map', panel: PANEL, title: title('Map') },
      ]}
      chosen={treeView.value}
      onChoose={(view) => {
        treeView.value = view
        focusTree() // after a click, arrow keys move in the tree
      }}
    />
  )
}

/** Handle the commands of the tree. Returns the undo. */
function takeKeys(loom: OpenLoom): () => void {
  const undo = provideAll({
    search: () => {
      showTree()
      if (isSearching.peek()) document.querySelector<HTMLElement>('.search input')?.focus()
      isSearching.value = true
    },
    hit: navigateToHit,
    select: (what) => {
      showTree()
      if (what === 'here') select(loom, loom.current.peek())
      else selectAll(loom, what)
    },
    withSelected: (verb) => {
      const nodes = [...loom.selected.peek()]
      if (!nodes.length) return false
      if (verb === 'grow') growSelected(loom)
      else act.removeMany(nodes)
      return true
    },
    menu: () => openMenuAtCurrent(loom),
    move: () => beginMove(loom, loom.current.peek()),
    place: () => {
      if (movedNode(loom) === null) return false
      moveTo(loom, loom.current.peek())
      return true
    },
    showBookmarks: () => {
      hasBookmarks.value = !hasBookmarks.peek()
      if (hasBookmarks.peek()) showTree()
    },
    closeTop: () => closeTop(loom),
  })
  return () => {
    undo()
    closeTree()
  }
}

/** Close what is open in the tree, one thing at a time. */
function closeTop(loom: OpenLoom): boolean {
  if (menu.peek()) menu.value = null
  else if (moving.peek() !== null) moving.value = null
  else if (loom.selected.peek().size) loom.selected.value = new Set()
  else return closeSearch()
  return true
}

function closeTree(): void {
  menu.value = null
  moving.value = null
  labelling.value = null
  isSearching.value = false
}
