import { render } from 'preact'
import './tokens.css'
import './fonts.css'
import './base.css'
import { question } from './state/actions'
import { listen } from './state/keys'
import { followAddress, keepWatch, watchServer } from './state/session'
import { failed } from './state/toasts'
import { overlay } from './state/view'
import { App } from './ui/App'

listen()
addEventListener('hashchange', () => {
  // The overlays belong to the previous loom.
  overlay.value = null
  question.peek()?.answer(false)
  void followAddress()
})
render(<App />, document.getElementById('app')!)
watchServer().catch(failed)
keepWatch()
void followAddress()
