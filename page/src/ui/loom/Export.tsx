/** Export a path, a subtree or the tree to a file format: preview, then save or copy. */
import { useEffect, useState } from 'preact/hooks'
import { ApiError, api } from '../../api/client'
import { formatOf, inOrder, SCOPES, type Scope } from '../../model/formats'
import { ROOT } from '../../model/tree'
import { bytes } from '../../model/words'
import { open, server } from '../../state/session'
import { remembered } from '../../state/storage'
import { failed, sentence } from '../../state/toasts'
import { TextButton } from '../Button'
import { Choice } from '../Choice'
import { copyText } from '../copy'
import { closeOverlay, Dialog } from '../Dialog'
import { save } from './files'

const PREVIEW = 4000 // characters
const lastFormat = remembered('export.format', 'text')

interface ExportedFile {
  file: Blob
  name: string
  head: string
}

export function Export() {
  const loom = open.value
  const formats = inOrder(server.value?.formats['export'] ?? ['text', 'json'])
  const format = formats.includes(lastFormat.value) ? lastFormat.value : formats[0]!
  const { unsupported = [], scope: usual } = formatOf(format)
  const [wanted, setWanted] = useState<Scope | null>(null)
  const scope = wanted && !unsupported.includes(wanted) ? wanted : usual
  const [exported, setExported] = useState<ExportedFile | null>(null)
  const [error, setError] = useState('')
  const [rankedBy, setRankedBy] = useState<'score' | 'rating' | 'bookmark'>(() =>
    [...(loom?.tree.nodes.values() ?? [])].some((each) => each.rating != null) ? 'rating' : 'score',
  )
  // A hoisted subtree counts as the tree.
  const top = loom?.top ?? 0
  const node = scope === 'tree' ? top : (loom?.current.value ?? 0)
  const isPart = scope === 'tree' && top !== ROOT

  useEffect(() => {
    if (!loom) return
    let isOld = false
    setError('')
    api
      .exportFile(loom.id, {
        format,
        scope: isPart ? 'subtree' : scope,
        node: String(node),
        by: format === 'pairs' ? rankedBy : null,
      })
      .then(async ({ file, name }) => {
        const head = await file.slice(0, 4 * PREVIEW).text()
        if (!isOld) setExported({ file, name, head: head.slice(0, PREVIEW) })
      })
      .catch((problem: unknown) => {
        if (isOld) return
        setExported(null)
        if (problem instanceof ApiError) setError(sentence(problem.message))
        else failed(problem)
      })
    return () => {
      isOld = true
    }
  }, [loom?.id, format, scope, node, rankedBy])

  const copy = async () => {
    if (await copyText(await exported!.file.text(), bytes(exported!.file.size))) closeOverlay()
  }
  return (
    <Dialog title="Export" width={560}>
      <div class="column export-form">
        <div class="row">
          <label class="label" for="export-format">
            Format
          </label>
          <select
            id="export-format"
            class="field"
            value={format}
            onChange={(event) => {
              lastFormat.value = event.currentTarget.value
              setWanted(null)
            }}
          >
            {formats.map((each) => (
              <option key={each} value={each}>
                {[formatOf(each).label, formatOf(each).description].filter(Boolean).join(', ')}
              </option>
            ))}
          </select>
        </div>
        <div class="row">
          <span class="label">Part</span>
          <Choice
            label="Part of the loom"
            values={(Object.keys(SCOPES) as Scope[]).map((each) => ({
              value: each,
              label: SCOPES[each],
              disabled: unsupported.includes(each),
            }))}
            chosen={scope}
            onChoose={setWanted}
          />
        </div>
        {format === 'pairs' && (
          <div class="row">
            <span class="label">Ranked by</span>
            <Choice
              label="Rank siblings by"
              values={[
                { value: 'score', label: 'Score' },
                { value: 'rating', label: 'Rating' },
                { value: 'bookmark', label: 'Bookmark' },
              ]}
              chosen={rankedBy}
              onChoose={setRankedBy}
            />
          </div>
        )}
        {isPart && <p class="caption">Only the subtree that is shown.</p>}
        <pre class="preview" role="region" aria-label="Preview" tabIndex={0}>
          {error ? <span class="error">{error}</span> : exported?.head}
        </pre>
        <div class="row">
          <span class="caption grow cut">{exported && `${exported.name}, ${bytes(exported.file.size)}`}</span>
          <TextButton disabled={!exported} onClick={() => void copy()}>
            Copy
          </TextButton>
          <TextButton
            kind="main"
            disabled={!exported}
            onClick={() => {
              save(exported!.file, exported!.name)
              closeOverlay()
            }}
          >
            Save
          </TextButton>
        </div>
      </div>
    </Dialog>
  )
}
