/** The search tab: the cost of a search, its rounds and its result. */
import { ChevronLeft, ChevronRight, Lightbulb } from 'lucide-preact'
import { useEffect } from 'preact/hooks'
import { api } from '../../api/client'
import { type Cost, costOf } from '../../model/run'
import { formatCount, plural } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import type { LiveRun } from '../../state/searches'
import { askStrategies, strategyTitle } from '../../state/strategies'
import { failed } from '../../state/toasts'
import { IconButton } from '../Button'
import { Candidates } from './Candidates'
import { RunAnswer } from './RunAnswer'
import './run.css'

const STATUS: Record<LiveRun['status'], string> = {
  running: 'searching',
  ok: 'done',
  cancelled: 'stopped',
  interrupted: 'interrupted',
  failed: 'failed',
}
const STOPPED: Record<NonNullable<Cost['stopped']>, string> = {
  tokens: 'out of tokens',
  seconds: 'out of time',
  kv: 'out of memory',
  constraint: 'the output format allows no more text',
}

export function RunTab({ loom }: { loom: OpenLoom }) {
  const run = loom.run.value
  useEffect(() => {
    void askStrategies()
  }, [])
  if (!run) return null
  const isRunning = run.status === 'running'
  const spent = costOf(run.rounds, run.result)
  const last = run.rounds.length
  const at = Math.min(loom.shownRound.value ?? last, last)
  const round = run.rounds[at - 1]
  const growing = [...loom.lanes.value.values()].filter((lane) => lane.job === run.job && !lane.isOver).length
  const budget = (name: string) => {
    const value = run.request[name]
    return typeof value === 'number' ? value : null
  }
  const show = (to: number) => {
    loom.shownRound.value = to >= last ? null : Math.max(1, to)
  }
  return (
    <div class="run">
      <section class="part" aria-label="Search">
        <div class="row">
          <h2 class="grow cut">
            {strategyTitle(run.request['strategy'])} <span class="muted">{STATUS[run.status]}</span>
          </h2>
          {isRunning ? (
            <button type="button" class="button" onClick={() => void api.cancel(run.job).catch(failed)}>
              Stop
            </button>
          ) : (
            <IconButton icon={Lightbulb} label="Solve again" command="run" />
          )}
        </div>
        <RunPicker loom={loom} run={run} />
        <Gauge name="Tokens" spent={spent.tokens} max={budget('budget_tokens')} />
        <Gauge name="Seconds" spent={spent.seconds} max={budget('budget_s')} digits={1} />
        <p class="caption" data-varies>
          {[
            spent.candidates ? plural(spent.candidates, 'candidate') : '',
            isRunning && growing ? `${growing} growing` : '',
            spent.stopped ? STOPPED[spent.stopped] : '',
          ]
            .filter(Boolean)
            .join(' · ')}
        </p>
        {run.error && <p class="error">{run.error}</p>}
      </section>
      {!isRunning && <RunAnswer loom={loom} run={run} />}
      {round && (
        <section class="part" aria-label="Rounds">
          <div class="row">
            <h2 class="grow">
              Round {at} <span class="muted">of {last}</span>
            </h2>
            <IconButton
              icon={ChevronLeft}
              label="Previous round"
              disabled={at <= 1}
              onClick={() => show(at - 1)}
            />
            <IconButton
              icon={ChevronRight}
              label="Next round"
              disabled={at >= last}
              onClick={() => show(at + 1)}
            />
          </div>
          {last > 1 && (
            <input
              type="range"
              class="run-slider"
              aria-label="Round"
              min={1}
              max={last}
              step={1}
              value={at}
              onInput={(event) => show(Number(event.currentTarget.value))}
            />
          )}
          <Candidates loom={loom} round={round} />
        </section>
      )}
      {!round && isRunning && (
        <section class="part">
          <p class="caption">The first round is running.</p>
        </section>
      )}
    </div>
  )
}

/** Choose the search that is shown. */
function RunPicker({ loom, run }: { loom: OpenLoom; run: LiveRun }) {
  const runs = loom.runs.value
  if (runs.length < 2) return null
  return (
    <select
      class="field"
      aria-label="Runs"
      value={run.job}
      onChange={(event) => {
        loom.shownRun.value = event.currentTarget.value
        loom.shownRound.value = null
      }}
    >
      {runs.map((each, at) => (
        <option key={each.job} value={each.job}>
          {`${at + 1}. ${strategyTitle(each.request['strategy'])}, ${STATUS[each.status]}`}
        </option>
      ))}
    </select>
  )
}

interface GaugeProps {
  name: string
  spent: number
  max: number | null
  digits?: number
}

/** The spent part of a budget, as a number and a bar. */
function Gauge({ name, spent, max, digits = 0 }: GaugeProps) {
  const shown = digits ? spent.toFixed(digits) : formatCount(spent)
  return (
    <div class="run-gauge" data-varies>
      <span class="muted">{name}</span>
      <span>
        {shown}
        {max !== null && <span class="muted"> of {formatCount(max)}</span>}
      </span>
      {max !== null && <span class="run-line" aria-hidden style={{ '--p': Math.min(spent / max, 1) }} />}
    </div>
  )
}
