/** Looms of other programs: from files, or pasted; what was recognised, and what was left out. */
import { useEffect, useRef, useState } from 'preact/hooks'
import { importable, importName } from '../../model/formats'
import { bytes, plural, titleOf } from '../../model/words'
import { linkTo, server } from '../../state/session'
import { sentence } from '../../state/toasts'
import { TextButton } from '../Button'
import { closeOverlay, Dialog } from '../Dialog'
import { type ImportRow, importFiles, importRows, PASTED } from './files'

export function Import() {
  const [pasted, setPasted] = useState('')
  const picker = useRef<HTMLInputElement>(null)
  const formats = server.value?.formats['import'] ?? []
  const maxBytes = server.value?.limits['import_bytes']
  const files = importRows.value
  useEffect(
    () => () => {
      importRows.value = []
    },
    [],
  )
  return (
    <Dialog title="Import" width={560}>
      <div class="column import-form">
        {files.length > 0 && <Report arrivals={files} />}
        <div class="import-target column">
          <p>Drop files anywhere on the page, or choose them.</p>
          <p>
            <TextButton onClick={() => picker.current!.click()}>Choose files</TextButton>
          </p>
          <p class="caption">
            {importable(formats)}.{maxBytes !== undefined && ` At most ${bytes(maxBytes)}.`}
          </p>
          <input
            ref={picker}
            type="file"
            multiple
            hidden
            aria-label="Files to import"
            onChange={(event) => {
              const { files } = event.currentTarget
              if (files?.length) void importFiles([...files])
              event.currentTarget.value = ''
            }}
          />
        </div>
        <label class="column">
          <span>Or paste text here</span>
          <textarea
            class="field"
            spellcheck={false}
            value={pasted}
            onInput={(event) => setPasted(event.currentTarget.value)}
          />
        </label>
        <div class="row">
          <span class="grow" />
          <TextButton
            kind="main"
            disabled={!pasted.trim()}
            onClick={() => {
              // It stays where it is until it has become a loom.
              void importFiles([new File([pasted], PASTED)]).then((isIn) => isIn && setPasted(''))
            }}
          >
            Import
          </TextButton>
        </div>
      </div>
    </Dialog>
  )
}

function Report({ arrivals }: { arrivals: readonly ImportRow[] }) {
  return (
    <div role="status" aria-label="Imported looms">
      <ul class="import-report">
        {arrivals.map((each, i) => (
          <li key={i}>
            <p class="cut">
              <strong>{each.file}</strong>
            </p>
            {each.state === 'reading' && <p class="muted">Reading…</p>}
            {each.state === 'failed' && (
              <>
                <p class="error">{each.error}</p>
                {each.hint && <p class="muted">{each.hint}</p>}
                {each.asText && <TextButton onClick={each.asText}>Import as plain text</TextButton>}
              </>
            )}
            {each.result && <Summary {...each.result} />}
          </li>
        ))}
      </ul>
    </div>
  )
}

/** Notes begin with how many; they are written for several. */
const noted = (note: string) => sentence(note.replace(/^1 /, ''))

function Summary({ recognised_as, nodes, looms, dropped }: NonNullable<ImportRow['result']>) {
  return (
    <>
      <p>
        {importName(recognised_as)}: {plural(nodes, 'node')} in {plural(looms.length, 'loom')}.
      </p>
      <ul class="came">
        {looms.map((each) => (
          <li key={each.id} class="row">
            <a href={linkTo(each.name)} onClick={closeOverlay}>
              {titleOf(each)}
            </a>
            <span class="caption">{plural(each.n_nodes, 'node')}</span>
          </li>
        ))}
      </ul>
      {dropped.length > 0 && (
        <>
          <p class="muted">Changed or left out, because a loom cannot store it:</p>
          <ul class="dropped">
            {dropped.map((each) => (
              <li key={each}>{noted(each)}</li>
            ))}
          </ul>
        </>
      )}
    </>
  )
}
