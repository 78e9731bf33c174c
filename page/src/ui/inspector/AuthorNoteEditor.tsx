/** The editor of the author's note: its text, and the place where growth inserts it. */
import { authorNoteOf, placeOf } from '../../model/author_note'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { TextField } from './TextField'

const MAX_DEPTH = 1000

export function AuthorNoteEditor({ loom }: { loom: OpenLoom }) {
  const note = authorNoteOf(loom.info.value)
  const setDepth = (field: HTMLInputElement) => {
    const depth = Number(field.value)
    if (field.value.trim() !== '' && Number.isInteger(depth) && depth >= 0 && depth <= MAX_DEPTH)
      void act.setAuthorNote({ ...note, depth })
    else field.value = String(note.depth)
  }
  return (
    <section class="part" aria-label="Author’s note">
      <h3>Author’s note</h3>
      <TextField
        kind="textarea"
        rows={3}
        label="Author’s note"
        placeholder="Facts or style that the model should keep in mind"
        value={note.text}
        onSave={(text) => void act.setAuthorNote({ ...note, text })}
      />
      <div class="row">
        <label for="note-depth" class="grow">
          {loom.isChat ? 'Messages after it' : 'Lines after it'}
        </label>
        <input
          id="note-depth"
          key={note.depth}
          class="field setting-field"
          inputMode="numeric"
          autocomplete="off"
          disabled={!note.text}
          defaultValue={String(note.depth)}
          onBlur={(event) => setDepth(event.currentTarget)}
          onKeyDown={(event) => event.key === 'Enter' && event.currentTarget.blur()}
        />
      </div>
      <p class="caption">
        {note.text
          ? `The model reads the note ${placeOf(note, loom.isChat)}. The note is not part of any node.`
          : 'The model reads the note while branches grow. The note is not part of any node.'}
      </p>
    </section>
  )
}
