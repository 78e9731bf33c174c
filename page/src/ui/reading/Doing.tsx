/** What can be done at the end of the text: grow, write, edit. */
import { Code, Flame, Pencil, Sprout, Square, TextCursorInput } from 'lucide-preact'
import { ROOT } from '../../model/tree'
import { plural } from '../../model/words'
import * as act from '../../state/actions'
import { handlers, isMac, keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { scoreAll, showsSpecial, unscored } from '../../state/reading'
import { isReadOnly } from '../../state/session'
import { settings } from '../../state/settings'
import { cycleHeat, heatMode } from '../../state/view'
import { IconButton } from '../Button'

export function Doing({ loom }: { loom: OpenLoom }) {
  const current = loom.current.value
  const { n } = settings.value
  const isChat = loom.info.value.chat_template_used === true
  loom.tree.version.value
  const isYourTurn = isChat && current !== ROOT && loom.tree.get(current)?.said == null
  const lanes = [...loom.lanes.value.values()]
  const live = lanes.filter((lane) => !lane.isOver)
  const grown = lanes.filter((lane) => lane.parent === current)
  const isStopped = grown.length > 0 && grown.every((lane) => lane.finish === 'cancelled')
  const isHere = live.some((lane) => lane.node === current)
  return (
    <div class="doing row">
      <button
        type="button"
        class="button main"
        title={`Grow  ${keyFor('grow')}`}
        disabled={isReadOnly.value || isHere}
        onClick={() => void act.grow(current)}
      >
        <Sprout aria-hidden />
        Grow {plural(n, 'branch', 'branches')}
      </button>
      <button
        type="button"
        class="button"
        title={`${isYourTurn ? 'Reply' : 'Write a child'}  ${keyFor('write')}`}
        disabled={isReadOnly.value}
        onClick={() => handlers.writeChild()}
      >
        <TextCursorInput aria-hidden />
        {isYourTurn ? 'Reply' : 'Write'}
      </button>
      <button
        type="button"
        class="button"
        title={`Edit, as a sibling  ${keyFor('edit')}`}
        disabled={isReadOnly.value}
        onClick={() => handlers.edit(false)}
      >
        <Pencil aria-hidden />
        Edit
      </button>
      {isStopped && <span class="caption">All stopped. What they had is kept.</span>}
      <span class="tools row">
        <Score loom={loom} />
        {live.length > 0 && (
          <button
            type="button"
            class="button plain"
            title={isHere ? keyFor('stop') : `${keyFor('stop')} ${isMac ? '' : 'twice'}`}
            onClick={() => void act.stopAll()}
          >
            <Square aria-hidden />
            {live.length > 1 ? 'Stop all' : 'Stop'}
          </button>
        )}
        {isChat && (
          <IconButton
            icon={Code}
            label="Show special tokens"
            pressed={showsSpecial.value}
            onClick={() => {
              showsSpecial.value = !showsSpecial.peek()
            }}
          />
        )}
        <IconButton
          icon={Flame}
          label={`Heat: ${heatMode.value}`}
          command="heat"
          pressed={heatMode.value !== 'off'}
          onClick={cycleHeat}
        />
      </span>
    </div>
  )
}

/** In heat what people wrote is blank until the model is asked how likely it is. */
function Score({ loom }: { loom: OpenLoom }) {
  if (heatMode.value === 'off' || isReadOnly.value) return null
  const written = unscored(loom)
  if (!written.length) return null
  return (
    <button
      type="button"
      class="button plain"
      title="Ask the model how likely is what was written"
      onClick={() => scoreAll(loom)}
    >
      Score
    </button>
  )
}
