/** One loom: tree, text and inspector side by side; on a narrow screen one of them at a time. */
import { Import as ImportIcon, Keyboard, Library, PanelLeft, PanelRight, Share, SunMoon } from 'lucide-preact'
import { useRef } from 'preact/hooks'
import type { OpenLoom } from '../state/loom'
import { narrowTab, panes, treeView } from '../state/view'
import { IconButton } from './Button'
import { Inspector } from './inspector/Inspector'
import { LoomTitle } from './loom/LoomTitle'
import { UndoButtons } from './loom/UndoButtons'
import { MoreMenu } from './MoreMenu'
import { ModelChip } from './model/ModelChip'
import { Notice } from './Notice'
import { Reading } from './reading/Reading'
import { StatusBar } from './StatusBar'
import { Hints } from './start/Hints'
import { Tabs } from './Tabs'
import { RowMenu } from './tree/RowMenu'
import { TreePane } from './tree/TreePane'
import './workbench.css'

const TABS = [
  { value: 'tree', label: 'Tree', panel: 'tree' },
  { value: 'text', label: 'Text', panel: 'text' },
  { value: 'inspector', label: 'Inspector', panel: 'inspector' },
] as const

export function Workbench({ loom }: { loom: OpenLoom }) {
  const { right, hasLeft, hasRight } = panes.value
  const left = panes.value[leftNow()]
  return (
    <div class="workbench" data-narrow={narrowTab.value}>
      <header class="bar row">
        <IconButton icon={PanelLeft} label="Tree" command="left" pressed={hasLeft} class="wide-only" />
        <IconButton icon={Library} label="Looms" command="looms" />
        <LoomTitle loom={loom} />
        <span class="grow" />
        <ModelChip />
        <UndoButtons loom={loom} />
        <IconButton icon={ImportIcon} label="Import" command="import" class="wide-only" />
        <IconButton icon={Share} label="Export" command="export" class="wide-only" />
        <IconButton icon={SunMoon} label="Theme, text size and width" command="look" class="wide-only" />
        <IconButton icon={Keyboard} label="Keyboard shortcuts" command="help" class="wide-only" />
        <MoreMenu />
        <IconButton
          icon={PanelRight}
          label="Inspector"
          command="right"
          pressed={hasRight}
          class="wide-only"
        />
      </header>
      <nav class="narrow-tabs" aria-label="Panes">
        <Tabs
          label="Panes"
          tabs={TABS}
          chosen={narrowTab.value}
          onChoose={(tab) => (narrowTab.value = tab)}
        />
      </nav>
      <Notice loom={loom} />
      <main class="panes">
        <section
          id="tree"
          class="pane left"
          aria-label="Tree"
          hidden={!hasLeft}
          style={{ '--width': `${left}px` }}
        >
          <h2 class="visually-hidden">Tree</h2>
          <TreePane loom={loom} />
          <Resizer side="left" />
        </section>
        <section id="text" class="pane middle" aria-label="Text">
          <h2 class="visually-hidden">Text</h2>
          <Reading loom={loom} />
        </section>
        <section
          id="inspector"
          class="pane right"
          aria-label="Inspector"
          hidden={!hasRight}
          style={{ '--width': `${right}px` }}
        >
          <Resizer side="right" />
          <h2 class="visually-hidden">Inspector</h2>
          <Inspector loom={loom} />
        </section>
        <RowMenu loom={loom} />
      </main>
      <Hints loom={loom} />
      <StatusBar loom={loom} />
    </div>
  )
}

/** The outline and the map have a width each. */
const leftNow = () => (treeView.value === 'map' ? 'map' : 'left')
const BOUNDS = { left: [200, 560], map: [280, 1200], right: [260, 560] } as const

/** A pane may be narrower than it was set: the text keeps room. */
const widthNow = (line: Element) => line.parentElement!.getBoundingClientRect().width

/** The line between two panes: dragged, or moved with the arrow keys. */
function Resizer({ side }: { side: 'left' | 'right' }) {
  const from = useRef<{ x: number; width: number } | null>(null)
  const which = side === 'left' ? leftNow() : side
  const [low, high] = BOUNDS[which]
  const towards = side === 'left' ? 1 : -1
  const resize = (width: number) => {
    panes.value = { ...panes.peek(), [which]: Math.round(Math.max(low, Math.min(high, width))) }
  }
  return (
    <div
      class="resizer"
      role="separator"
      aria-orientation="vertical"
      aria-label={side === 'left' ? 'Width of the tree' : 'Width of the inspector'}
      aria-valuemin={low}
      aria-valuemax={high}
      aria-valuenow={panes.value[which]}
      tabIndex={0}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId)
        from.current = { x: event.clientX, width: widthNow(event.currentTarget) }
      }}
      onPointerMove={(event) =>
        from.current && resize(from.current.width + towards * (event.clientX - from.current.x))
      }
      onPointerUp={() => (from.current = null)}
      onKeyDown={(event) => {
        const by = { ArrowLeft: -16, ArrowRight: 16 }[event.key]
        if (by === undefined) return
        event.preventDefault()
        event.stopPropagation()
        resize(widthNow(event.currentTarget) + towards * by)
      }}
    />
  )
}
