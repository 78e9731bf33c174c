/** Files that come to the page and leave it. */
import { signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../../api/client'
import { bytes } from '../../model/words'
import { listLooms, serverTold } from '../../state/session'
import { failed, sentence } from '../../state/toasts'
import { overlay } from '../../state/view'

/** What came of a file. */
export interface Arrival {
  file: string
  state: 'reading' | 'done' | 'failed'
  told: Schemas['Imported'] | null
  error: string
  hint: string
}

/** Of the files that were brought last. */
export const arrivals = signal<readonly Arrival[]>([])

/** Let the browser save a file. */
export function save(file: Blob, name: string): void {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(file)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
}

/** Bring files in, one after the other; the import dialog tells how it goes. Returns whether all are in. */
export async function bring(files: readonly File[]): Promise<boolean> {
  overlay.value = 'import'
  const from = arrivals.peek().length
  arrivals.value = [
    ...arrivals.peek(),
    ...files.map((file) => ({
      file: file.name,
      state: 'reading' as const,
      told: null,
      error: '',
      hint: '',
    })),
  ]
  const change = (i: number, to: Partial<Arrival>) => {
    arrivals.value = arrivals.peek().map((each, at) => (at === from + i ? { ...each, ...to } : each))
  }
  for (const [i, file] of files.entries()) {
    try {
      await refuseLarge(file)
      change(i, { state: 'done', told: await api.importFile(file, {}) })
    } catch (error) {
      if (!(error instanceof ApiError)) failed(error)
      const hint = error instanceof ApiError ? error.hint : ''
      change(i, { state: 'failed', error: sentence((error as Error).message), hint: sentence(hint) })
    }
  }
  await listLooms().catch(failed)
  return arrivals
    .peek()
    .slice(from)
    .every((each) => each.state === 'done')
}

/** Nothing is sent that the server would refuse for its size. */
async function refuseLarge(file: File): Promise<void> {
  const most = (await serverTold())?.limits['import_bytes']
  if (most !== undefined && file.size > most)
    throw new ApiError(
      413,
      'body_too_large',
      `The file has ${bytes(file.size)}; the server takes at most ${bytes(most)}.`,
      'Export a part of it where it comes from.',
    )
  if (file.size === 0) throw new ApiError(400, 'unknown_format', 'The file is empty.')
}
