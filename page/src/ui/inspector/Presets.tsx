/** Named settings: applied by a click or a key, kept, renamed and removed. */
import { Pencil, Plus, Trash2 } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { FIGURE_FIELDS, type Figure } from '../../model/fields'
import { keyFor } from '../../state/keys'
import {
  applyPreset,
  chosenPreset,
  NEUTRAL,
  type Preset,
  presets,
  removePreset,
  renamePreset,
  type Settings,
  savePreset,
} from '../../state/settings'
import { toast } from '../../state/toasts'
import { IconButton } from '../Button'

const LABELS: Partial<Record<keyof Settings, string>> = { stop: 'stop at', constraint: 'an output format' }

/** The settings of a preset that are not neutral. */
function presetSummary(preset: Preset): string {
  const parts: string[] = []
  for (const [name, value] of Object.entries(preset) as [keyof Settings | 'name', unknown][]) {
    if (name === 'name' || JSON.stringify(value) === JSON.stringify(NEUTRAL[name])) continue
    const label =
      name in FIGURE_FIELDS ? FIGURE_FIELDS[name as Figure].label.toLowerCase() : (LABELS[name] ?? name)
    parts.push(name === 'constraint' ? label : `${label} ${Array.isArray(value) ? value.length : value}`)
  }
  return parts.join(', ') || 'The model’s distribution without changes; suits base models'
}

export function Presets() {
  /** The purpose of the typed name; null: the field is closed. */
  const [naming, setNaming] = useState<'new' | 'old' | null>(null)
  const chosen = chosenPreset.value
  const remove = () => {
    if (!chosen) return
    const before = presets.peek()
    removePreset(chosen.name)
    toast(`Removed the preset ${chosen.name}`, {
      action: { label: 'Undo', run: () => (presets.value = before) },
    })
  }
  return (
    <section class="part" aria-label="Presets">
      <div class="row">
        <h2 class="grow">Presets</h2>
        {chosen && (
          <>
            <IconButton icon={Pencil} label={`Rename ${chosen.name}`} onClick={() => setNaming('old')} />
            <IconButton icon={Trash2} label={`Remove ${chosen.name}`} onClick={remove} />
          </>
        )}
        <IconButton icon={Plus} label="Save these settings as a preset" onClick={() => setNaming('new')} />
      </div>
      <div class="choices" role="group" aria-label="Presets">
        {presets.value.map((each, at) => (
          <button
            key={each.name}
            type="button"
            aria-pressed={chosen?.name === each.name}
            title={[presetSummary(each), at < 5 ? keyFor(`preset-${at + 1}`) : ''].filter(Boolean).join('  ')}
            onClick={() => applyPreset(each)}
          >
            {each.name}
          </button>
        ))}
      </div>
      {naming && (
        <form
          class="row"
          onSubmit={(event) => {
            event.preventDefault()
            const name = (event.currentTarget.elements.namedItem('name') as HTMLInputElement).value.trim()
            if (!name) return
            if (naming === 'old' && chosen) renamePreset(chosen.name, name)
            else savePreset(name)
            setNaming(null)
          }}
        >
          <input
            class="field"
            name="name"
            maxLength={40}
            aria-label="Name of the preset"
            placeholder="Name"
            defaultValue={naming === 'old' ? chosen?.name : ''}
            ref={(field) => field?.focus()}
            onKeyDown={(event) => event.key === 'Escape' && setNaming(null)}
          />
          <button type="submit" class="button">
            {naming === 'old' ? 'Rename' : 'Save'}
          </button>
        </form>
      )}
    </section>
  )
}
