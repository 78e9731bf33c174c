/** The history of the loom: each change with its author and time, and Undo and Redo. */
import { Redo2, Undo2 } from 'lucide-preact'
import { useEffect, useState } from 'preact/hooks'
import { api, type Schemas } from '../../api/client'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { failed } from '../../state/toasts'
import { IconButton } from '../Button'
import { moment, operationLabel } from './operations'

type Operation = Schemas['OperationObject']

export function History({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const [rows, setRows] = useState<Operation[] | null>(null)
  const rev = loom.tree.rev
  useEffect(() => {
    let isOver = false
    const timer = setTimeout(() => {
      api.history(loom.id).then(
        (reply) => !isOver && setRows(reply.data),
        (error) => !isOver && failed(error),
      )
    }, 200)
    return () => {
      isOver = true
      clearTimeout(timer)
    }
  }, [loom.id, rev])
  if (!rows) return null
  const back = async (steps: number, turn: () => Promise<unknown>) => {
    for (let i = 0; i < steps; i++) if ((await turn()) === undefined) return
  }
  // Those that were done stand before those undone, the last one first.
  const done = rows.filter((each) => each.state === 'done')
  const undone = rows.filter((each) => each.state === 'undone').reverse()
  return (
    <section class="part" aria-label="History">
      <div class="row">
        <h2 class="grow">History</h2>
        <IconButton icon={Undo2} label="Undo" command="undo" disabled={!done.length} />
        <IconButton icon={Redo2} label="Redo" command="redo" disabled={!undone.length} />
      </div>
      <ol class="history">
        {rows.map((each) => {
          const at = each.state === 'done' ? done.indexOf(each) : undone.indexOf(each)
          const isUndone = each.state === 'undone'
          return (
            <li
              key={`${each.at} ${each.rev}`}
              class={isUndone || each.state === 'dropped' ? 'is-undone' : ''}
            >
              <button
                type="button"
                disabled={each.state === 'dropped' || each.state === 'first' || (!isUndone && at === 0)}
                title={title(each, at)}
                onClick={() => void (isUndone ? back(at + 1, act.redo) : back(at, act.undo))}
              >
                <span class="grow cut">
                  {operationLabel(each.kind, each.actor)}
                  <span class="muted"> {details(each)}</span>
                </span>
                <time class="caption" dateTime={each.at} data-varies>
                  {short(each.at)}
                </time>
              </button>
            </li>
          )
        })}
      </ol>
    </section>
  )
}

function title(each: Operation, at: number): string {
  const when = moment(each.at)
  if (each.state === 'dropped') return `${when} · undone; later changes replaced it`
  if (each.state === 'undone') return `${when} · redo up to this change`
  if (each.state === 'first') return `${when} · the new loom`
  return at === 0 ? `${when} · the current state` : `${when} · undo the changes after this one`
}

function details(each: Operation): string {
  const parts = [
    each.n_added ? `+${each.n_added}` : '',
    each.n_removed ? `−${each.n_removed}` : '',
    !each.n_added && !each.n_removed && each.n_changed > 1 ? `${each.n_changed}` : '',
  ]
  return parts.filter(Boolean).join(' ')
}

const short = (at: string): string => {
  const when = new Date(at)
  return when.toDateString() === new Date().toDateString()
    ? when.toLocaleTimeString(undefined, { timeStyle: 'short' })
    : when.toLocaleDateString(undefined, { month: 'short', day: 'numeric' })
}
