/** Files that come to the page and leave it. */
import { signal } from '@preact/signals'
import { ApiError, api, type Schemas } from '../../api/client'
import { bytes, oneLine } from '../../model/words'
import { openAt } from '../../state/position'
import { listLooms, waitForServer } from '../../state/session'
import { failed, sentence } from '../../state/toasts'
import { overlay } from '../../state/view'

/** The result of importing a file. */
export interface ImportRow {
  file: string
  state: 'reading' | 'done' | 'failed'
  result: Schemas['Imported'] | null
  error: string
  hint: string
  /** Imports a file of an unknown format as plain text; null if that cannot help. */
  asText: (() => void) | null
}

/** Of the files that were brought last. */
export const importRows = signal<readonly ImportRow[]>([])

/** Let the browser save a file. */
export function save(file: Blob, name: string): void {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(file)
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
}

const TEXT_FILE = /\.(txt|text|md|markdown)$/i

/** The query of an import. Plain text has no title of its own, so that its loom gets the file's name. */
function queryFor(file: File, isText: boolean): { format?: string; title?: string } {
  const title = oneLine(file.name.replace(/\.\w+$/, ''), 120)
  return isText ? { format: 'text', ...(title && title !== PASTED ? { title } : {}) } : {}
}

/** The name of pasted text among files. */
export const PASTED = 'Pasted text'

/** Import files, one after the other, and show the results in the import dialog. Return true if all succeeded. */
export async function importFiles(files: readonly File[]): Promise<boolean> {
  overlay.value = 'import'
  const from = importRows.peek().length
  const reading = { state: 'reading' as const, result: null, error: '', hint: '', asText: null }
  importRows.value = [...importRows.peek(), ...files.map((file) => ({ file: file.name, ...reading }))]
  for (const [i, file] of files.entries()) await importOne(file, from + i, TEXT_FILE.test(file.name))
  await listLooms().catch(failed)
  return importRows
    .peek()
    .slice(from)
    .every((each) => each.state === 'done')
}

/** Import a file and update its row in `arrivals`. */
async function importOne(file: File, row: number, isText: boolean): Promise<void> {
  const change = (to: Partial<ImportRow>) => {
    importRows.value = importRows.peek().map((each, at) => (at === row ? { ...each, ...to } : each))
  }
  change({ state: 'reading', error: '', hint: '', asText: null })
  try {
    await checkSize(file)
    const result = await api.importFile(file, queryFor(file, isText))
    for (const [i, loom] of result.looms.entries()) openAt(loom.id, result.at[i]!)
    change({ state: 'done', result })
  } catch (error) {
    if (!(error instanceof ApiError)) failed(error)
    const isFormat = error instanceof ApiError && error.code === 'unknown_format' && !isText
    const asText = () => void importOne(file, row, true).then(() => listLooms().catch(failed))
    // The server's hint names a parameter of the request; the button sends it.
    const hint = error instanceof ApiError && !isFormat ? error.hint : ''
    change({
      state: 'failed',
      error: sentence((error as Error).message),
      hint: sentence(hint),
      asText: isFormat ? asText : null,
    })
  }
}

/** Reject a file that exceeds the server's limit before it is sent. */
async function checkSize(file: File): Promise<void> {
  const maxBytes = (await waitForServer())?.limits['import_bytes']
  if (maxBytes !== undefined && file.size > maxBytes)
    throw new ApiError(
      413,
      'body_too_large',
      `The file has ${bytes(file.size)}; the server takes at most ${bytes(maxBytes)}.`,
      'Export a smaller part from the program that wrote it.',
    )
  if (file.size === 0) throw new ApiError(400, 'empty_file', 'The file is empty.')
}
