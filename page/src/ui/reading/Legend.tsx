/** The meaning of the tints, with numbers, for the status bar. Empty without heat. */
import { useState } from 'preact/hooks'
import { BOUNDS, type HeatMode } from '../../model/heat'
import { inPercent, probability } from '../../model/words'
import { keyFor } from '../../state/keys'
import { threshold } from '../../state/reading'
import { cycleHeat, heatMode } from '../../state/view'

const NAMES: Record<HeatMode, string> = { off: '', probability: 'p', entropy: 'entropy, nats', rank: 'rank' }

export function HeatLegend() {
  const [typed, setTyped] = useState<string | null>(null)
  const mode = heatMode.value
  if (mode === 'off') return null
  return (
    <div class="heat-legend row" role="group" aria-label={`Colours by ${mode}`}>
      <button
        type="button"
        class="legend-mode"
        title={`Coloured by ${mode}  ${keyFor('heat')}`}
        onClick={cycleHeat}
      >
        {NAMES[mode]}
      </button>
      {BOUNDS[mode].map((bound, i) => (
        <span key={bound} class="swatch" data-heat={i + 1}>
          {mode === 'probability'
            ? `<\u202f${probability(bound)}`
            : mode === 'rank'
              ? `>\u202f${bound}`
              : `≥\u202f${bound}`}
        </span>
      ))}
      <label class="row">
        only p &lt;
        <input
          class="field"
          type="number"
          min="0"
          max="100"
          step="5"
          placeholder="100"
          aria-label="Only colour tokens less likely than, in per cent"
          value={typed ?? (threshold.value === null ? '' : inPercent(threshold.value))}
          onInput={(event) => {
            const { value, valueAsNumber: given } = event.currentTarget
            setTyped(value) // as it stands: "0." is on the way to a number
            threshold.value = given > 0 && given < 100 ? given / 100 : null
          }}
          onBlur={() => setTyped(null)}
        />
        %
      </label>
    </div>
  )
}
