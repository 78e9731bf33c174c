/** The beginning: one text, one button; below, the looms that are kept. */
import { Import as ImportIcon, Keyboard, SunMoon } from 'lucide-preact'
import { isAway, looms } from '../../state/session'
import { IconButton } from '../Button'
import { LoomList } from '../loom/LoomList'
import { MissingLoom } from './MissingLoom'
import { PromptForm } from './PromptForm'
import './first-run.css'

export function FirstRun() {
  const hasLooms = (looms.value?.length ?? 0) > 0
  return (
    <div class={`first-run ${hasLooms ? '' : 'is-new'}`}>
      <header class="bar row">
        <span class="wordmark">Weft</span>
        <span class="grow" />
        <IconButton icon={ImportIcon} label="Import" command="import" />
        <IconButton icon={SunMoon} label="Theme, text size and width" command="look" />
        <IconButton icon={Keyboard} label="Keyboard shortcuts" command="help" />
      </header>
      <main>
        <MissingLoom />
        <PromptForm />
        {hasLooms && (
          <section class="kept" aria-labelledby="kept-looms">
            <h2 id="kept-looms">Looms</h2>
            <LoomList />
          </section>
        )}
      </main>
      {isAway.value && (
        <footer class="status row">
          <span class="error">Reconnecting. Nothing is lost.</span>
        </footer>
      )}
    </div>
  )
}
