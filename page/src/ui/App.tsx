/** The whole page: the beginning, or a loom, and what lies above them. */
import { effect } from '@preact/signals'
import { question } from '../state/actions'
import { missing, open } from '../state/session'
import { type Overlay, overlay, theme } from '../state/view'
import { Confirm } from './Confirm'
import { Help } from './Help'
import { Export } from './loom/Export'
import { Import } from './loom/Import'
import { Looms } from './loom/Looms'
import { Gauge } from './model/Gauge'
import { Models } from './model/Models'
import { Palette } from './Palette'
import { StartRun } from './run/StartRun'
import { FirstRun } from './start/FirstRun'
import { Toasts } from './Toasts'
import { Workbench } from './Workbench'

const OVERLAYS: Record<Overlay, () => preact.JSX.Element | null> = {
  help: Help,
  palette: Palette,
  export: Export,
  import: Import,
  looms: Looms,
  models: Models,
  run: StartRun,
  gauge: Gauge,
}

const dark = matchMedia('(prefers-color-scheme: dark)')
const paintTheme = () => {
  const isDark = theme.value === 'dark' || (theme.value === 'system' && dark.matches)
  document.documentElement.dataset['theme'] = isDark ? 'dark' : 'light'
}
effect(paintTheme)
dark.addEventListener('change', paintTheme)

export function App() {
  const Above = overlay.value ? OVERLAYS[overlay.value] : null
  return (
    <>
      {open.value ? (
        <Workbench loom={open.value} key={open.value.id} />
      ) : (
        <FirstRun missing={missing.value} />
      )}
      {Above && <Above />}
      {question.value && <Confirm />}
      <Toasts />
    </>
  )
}
