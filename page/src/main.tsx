import { render } from 'preact'
import './tokens.css'
import './fonts.css'
import './base.css'
import { listen } from './state/keys'
import { followAddress, keepWatch, watchServer } from './state/session'
import { failed } from './state/toasts'
import { App } from './ui/App'

listen()
addEventListener('hashchange', () => void followAddress())
render(<App />, document.getElementById('app')!)
watchServer().catch(failed)
keepWatch()
void followAddress()
