/** How far the loading of a model is, in words. */
import { bytes } from './words'

export interface Loading {
  words: string
  /** From 0 to 1; null: unknown. */
  share: number | null
}

const PHASES: Record<string, string> = { download: 'Downloading', load: 'Reading the weights' }
/** Engines count layers or bytes: nothing has so many layers. */
const SURELY_BYTES = 100_000

/** progress: the server's `phase`, `done` and `total`. */
export function loading(progress: Record<string, unknown> | null | undefined): Loading {
  const phase = String(progress?.['phase'] ?? 'load')
  const [done, total] = [Number(progress?.['done'] ?? 0), Number(progress?.['total'] ?? 0)]
  const isBytes = phase === 'download' || total > SURELY_BYTES
  const words = PHASES[phase] ?? phase
  return {
    words: isBytes && total > 0 ? `${words}, ${bytes(done)} of ${bytes(total)}` : words,
    share: total > 1 ? Math.min(1, done / total) : null,
  }
}
