/** The page: the start screen or a loom, and the overlays. */
import { effect } from '@preact/signals'
import { titleOf } from '../model/words'
import { question } from '../state/actions'
import { isAway, open, opening } from '../state/session'
import { dialogs, type Overlay, overlay, textSize, textWidth, theme } from '../state/view'
import { Appearance } from './Appearance'
import { Compare } from './Compare'
import { Confirm } from './Confirm'
import { ErrorBoundary } from './ErrorBoundary'
import { Help } from './Help'
import { DropTarget } from './loom/DropTarget'
import { Export } from './loom/Export'
import { Import } from './loom/Import'
import { Looms } from './loom/Looms'
import { GrowWith } from './model/GrowWith'
import { MemoryDialog } from './model/MemoryDialog'
import { Models } from './model/Models'
import { Palette } from './Palette'
import { StartRun } from './run/StartRun'
import { FirstRun } from './start/FirstRun'
import { Toasts } from './Toasts'
import { Tooltip } from './Tooltip'
import { Workbench } from './Workbench'
import './print.css'

const OVERLAYS: Record<Overlay, () => preact.JSX.Element | null> = {
  help: Help,
  palette: Palette,
  export: Export,
  import: Import,
  looms: Looms,
  models: Models,
  run: StartRun,
  gauge: MemoryDialog,
  look: Appearance,
  compare: Compare,
  'grow-with': GrowWith,
}

const dark = matchMedia('(prefers-color-scheme: dark)')
const paint = () => {
  const isDark = theme.value === 'dark' || (theme.value === 'system' && dark.matches)
  const { dataset } = document.documentElement
  dataset['theme'] = isDark ? 'dark' : 'light'
  dataset['size'] = textSize.value
  dataset['width'] = textWidth.value
}
effect(paint)
dark.addEventListener('change', paint)
effect(() => {
  const loom = open.value
  document.title = loom ? `${titleOf(loom.info.value)} · Weft` : 'Weft'
})

export function App() {
  return (
    <ErrorBoundary>
      <Content />
    </ErrorBoundary>
  )
}

function Content() {
  const Above = overlay.value ? OVERLAYS[overlay.value] : null
  return (
    <>
      <Below />
      {Above && <Above />}
      {question.value && <Confirm />}
      <DropTarget />
      {!dialogs.value.length && <Toasts />}
      <Tooltip />
    </>
  )
}

function Below() {
  if (open.value) return <Workbench loom={open.value} key={open.value.id} />
  if (opening.value === null) return <FirstRun />
  return (
    <main class="opening" aria-busy="true">
      <p class="muted">{isAway.value ? 'Reconnecting. Nothing is lost.' : `Opening ${opening.value}`}</p>
    </main>
  )
}
