/** Named settings: applied by a click or a key, kept, renamed and removed. */
import { Pencil, Plus, Trash2 } from 'lucide-preact'
import { useState } from 'preact/hooks'
import { labelInText } from '../../model/fields'
import { keyFor } from '../../state/keys'
import {
  applyPreset,
  chosenPreset,
  NEUTRAL,
  type Preset,
  presets,
  removePreset,
  renamePreset,
  savePreset,
} from '../../state/settings'
import { toast } from '../../state/toasts'
import { IconButton } from '../Button'

/** The settings of a preset that are not neutral. */
function presetSummary({ name: _, ...settings }: Preset): string {
  const neutral: Record<string, unknown> = NEUTRAL
  const parts = Object.entries(settings)
    .filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(neutral[name]))
    .map(([name, value]) => {
      const label = labelInText(name)
      if (Array.isArray(value)) return `${label} ${value.length}`
      return typeof value === 'number' ? `${label} ${value}` : label
    })
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
