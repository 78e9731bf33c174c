import { render } from 'preact'
import './tokens.css'
import './fonts.css'
import './base.css'
import { listen } from './state/keys'
import { followAddress, listLooms, watchServer } from './state/session'
import { failed } from './state/toasts'
import { App } from './ui/App'

listen()
addEventListener('hashchange', () => void followAddress())
render(<App />, document.getElementById('app')!)
watchServer().catch(failed)
listLooms().catch(failed)
void followAddress()
