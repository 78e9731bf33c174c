/** Models that come and go: what the page asks of the shelf. */
import { api, type Schemas } from '../api/client'
import { server, watchServer } from './session'
import { failed } from './toasts'

/** Begin to load a model; how far it is stands in the session's models. */
export async function loadModel(request: Schemas['LoadModel']): Promise<boolean> {
  try {
    await api.loadModel(request)
    await refresh()
    return true
  } catch (error) {
    failed(error)
    return false
  }
}

/** Unload a model, or give up loading it. force: also while jobs use it, which fail then. */
export async function unloadModel(id: string, force = false): Promise<void> {
  try {
    await api.unloadModel(id, force)
  } catch (error) {
    failed(error)
  }
  await refresh()
}

async function refresh(): Promise<void> {
  try {
    server.value = await api.server()
  } catch (error) {
    failed(error)
  }
  watchServer().catch(failed)
}
