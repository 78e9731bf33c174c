/** The actions at the end of the text: grow, write, edit. */
import {
  Bot,
  Code,
  Columns3,
  Flame,
  Pencil,
  Pilcrow,
  RotateCcw,
  Sprout,
  Square,
  TextCursorInput,
} from 'lucide-preact'
import { ROOT } from '../../model/tree'
import { plural } from '../../model/words'
import * as act from '../../state/actions'
import { call } from '../../state/handlers'
import { isMac, keyFor, run } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { scoreAll, showsSpecial, unscored } from '../../state/reading'
import { isReadOnly, models } from '../../state/session'
import { nSeveralAnswers, settings, withModels } from '../../state/settings'
import { cycleHeat, heatMode, showsMarkdown } from '../../state/view'
import { IconButton } from '../Button'

export function ActionBar({ loom }: { loom: OpenLoom }) {
  const current = loom.current.value
  const { n } = settings.value
  const { isChat } = loom
  loom.tree.version.value
  const isYourTurn = isChat && current !== ROOT && loom.tree.get(current)?.said == null
  const lanes = [...loom.lanes.value.values()]
  const live = lanes.filter((lane) => !lane.isOver)
  const grown = lanes.filter((lane) => lane.parent === current)
  const isStopped = grown.length > 0 && grown.every((lane) => lane.finish === 'cancelled')
  const isHere = live.some((lane) => lane.node === current)
  return (
    <div class="action-bar row">
      {isYourTurn ? (
        <Composer isHere={isHere} />
      ) : (
        <button
          type="button"
          class="button main"
          title={`Grow  ${keyFor('grow')}`}
          disabled={isReadOnly.value || isHere}
          onClick={() => void act.grow(current)}
        >
          <Sprout aria-hidden />
          {isChat && n === 1 ? 'Answer' : `Grow ${plural(n, 'branch', 'branches')}`}
          {withModels.value}
        </button>
      )}
      {isChat && !isYourTurn && n === 1 && (
        <button
          type="button"
          class="button"
          aria-label={`Grow ${nSeveralAnswers.value} answers`}
          title={`Grow ${nSeveralAnswers.value} answers`}
          disabled={isReadOnly.value || isHere}
          onClick={() => void act.grow(current, { n: nSeveralAnswers.peek() })}
        >
          ×{nSeveralAnswers.value}
        </button>
      )}
      {!isChat && (
        <button
          type="button"
          class="button"
          title={`Grow one branch until it ends  ${keyFor('continue')}`}
          disabled={isReadOnly.value || isHere}
          onClick={() => run('continue')}
        >
          Continue
        </button>
      )}
      {!isYourTurn && (
        <button
          type="button"
          class="button"
          title={`Write a continuation  ${keyFor('write')}`}
          disabled={isReadOnly.value}
          onClick={() => call('writeChild')}
        >
          <TextCursorInput aria-hidden />
          Write
        </button>
      )}
      <button
        type="button"
        class="button"
        title={`Edit as a new sibling  ${keyFor('edit')}`}
        disabled={isReadOnly.value}
        onClick={() => call('edit', false)}
      >
        <Pencil aria-hidden />
        Edit
      </button>
      {isStopped && <span class="caption">All stopped. Their text is saved.</span>}
      <span class="tools row">
        {models.value.length > 1 && (
          <IconButton icon={Bot} label="Grow with other models" command="grow-with" />
        )}
        {loom.tree.children(current).length > 1 && (
          <IconButton icon={Columns3} label="Compare branches side by side" command="compare" />
        )}
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
          icon={Pilcrow}
          label={showsMarkdown(isChat) ? 'Show the exact text' : 'Show as Markdown'}
          command="markdown"
          pressed={showsMarkdown(isChat)}
        />
        <IconButton
          icon={Flame}
          label={heatMode.value === 'off' ? 'Colour by probability' : `Coloured by ${heatMode.value}`}
          command="heat"
          pressed={heatMode.value !== 'off'}
          onClick={cycleHeat}
        />
      </span>
    </div>
  )
}

/** In heat, written text has no colour until the model has scored it. */
function Score({ loom }: { loom: OpenLoom }) {
  if (heatMode.value === 'off' || isReadOnly.value) return null
  const written = unscored(loom)
  if (!written.length) return null
  return (
    <button
      type="button"
      class="button plain"
      title="Compute the probabilities of written text"
      onClick={() => scoreAll(loom)}
    >
      Score
    </button>
  )
}

/** In a chat, once the answer is there: the closed field of the next message, another answer, and more of this one. */
function Composer({ isHere }: { isHere: boolean }) {
  const { n } = settings.value
  return (
    <>
      <button
        type="button"
        class="composer"
        title={`Reply  ${keyFor('write')}`}
        disabled={isReadOnly.value}
        onClick={() => call('writeChild')}
      >
        Reply
      </button>
      <button
        type="button"
        class="button"
        title={`Grow another answer  ${keyFor('siblings')}`}
        disabled={isReadOnly.value || isHere}
        onClick={() => run('siblings')}
      >
        <RotateCcw aria-hidden />
        Retry
      </button>
      <button
        type="button"
        class="button"
        title={
          n === 1
            ? `Continue this answer until it ends  ${keyFor('continue')}`
            : `Continue this answer  ${keyFor('grow')}`
        }
        disabled={isReadOnly.value || isHere}
        onClick={() => run(n === 1 ? 'continue' : 'grow')}
      >
        <Sprout aria-hidden />
        {n === 1 ? 'Continue' : `Grow ${plural(n, 'branch', 'branches')}`}
      </button>
    </>
  )
}
