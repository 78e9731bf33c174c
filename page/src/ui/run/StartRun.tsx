/** A search for an answer below the current node: which way, how wide, and what it may spend. */
import { useEffect, useRef, useState } from 'preact/hooks'
import { ApiError, type RunRequest } from '../../api/client'
import { SEED_EXCEPTIONS } from '../../model/fields'
import { ROOT } from '../../model/tree'
import { oneLine, shortName } from '../../model/words'
import * as act from '../../state/actions'
import type { OpenLoom } from '../../state/loom'
import { isReadOnly, open } from '../../state/session'
import { isObject, isString, remembered } from '../../state/storage'
import { askStrategies, type Strategy, strategies, strategyTitle } from '../../state/strategies'
import { failed } from '../../state/toasts'
import { TextButton } from '../Button'
import { closeOverlay, Dialog } from '../Dialog'
import { ANSWER_FIELDS, AnswerFields, answerRequest } from './AnswerFields'
import { RunField } from './RunField'
import './run.css'

/** The strategy that the person chose last; "": none yet. */
const last = remembered('run.strategy', '')
/** The last request: the typed text by field. */
const USUAL: Record<string, string> = { budget_tokens: '2000', budget_s: '60' }
const typed = remembered('run.figures', USUAL, (kept) =>
  isObject(kept)
    ? Object.fromEntries(Object.entries(kept).filter((each): each is [string, string] => isString(each[1])))
    : USUAL,
)

const NUMBERS = ['breadth', 'n', 'temperature', 'max_tokens', 'seed', 'budget_tokens', 'budget_s'] as const
type NumberName = (typeof NUMBERS)[number]
const FIELDS: readonly string[] = [...NUMBERS, ...ANSWER_FIELDS]

/** Strategies that generate full answers, not steps. */
const ANSWERING = new Set(['best-of-n', 'weighted-best-of-n', 'greedy'])

export function StartRun() {
  const [wrong, setWrong] = useState<FieldError | null>(null)
  const [isBusy, setBusy] = useState(false)
  useEffect(() => {
    void askStrategies()
  }, [])
  const form = useRef<HTMLFormElement>(null)
  const isThere = strategies.value.length > 0
  useEffect(() => form.current?.querySelector<HTMLElement>('input:checked')?.focus(), [isThere])
  const loom = open.value
  if (!loom) return null
  const named = (name: string | null | undefined) => strategies.value.find((each) => each.name === name)
  const chosen = named(last.value) ?? named(loom.info.value.default_strategy)
  const at = loom.current.value
  const text = at === ROOT ? loom.info.value.prompt : (loom.tree.get(at)?.text ?? '')
  const start = async () => {
    if (!chosen || isBusy) return
    const { request, wrong } = read(chosen, at, loom)
    if (!request) return setWrong(wrong)
    setBusy(true)
    try {
      await act.search(request)
      closeOverlay()
    } catch (error) {
      setBusy(false)
      const param = error instanceof ApiError ? (error.param ?? firstWord(error.message)) : null
      if (param && FIELDS.includes(param)) setWrong({ field: param, message: (error as Error).message })
      else if (error instanceof ApiError) setWrong({ field: '', message: error.message })
      else failed(error)
    }
  }
  const field = (name: NumberName, label: string, placeholder: string, hint = '') => (
    <RunField
      key={name}
      name={name}
      label={label}
      placeholder={placeholder}
      hint={hint}
      wrong={wrong?.field === name ? wrong.message : ''}
      value={typed.value[name] ?? ''}
      onInput={(value) => {
        setWrong(null)
        typed.value = { ...typed.peek(), [name]: value }
      }}
    />
  )
  return (
    <Dialog title="Solve: search for an answer" width={600} class="start-run">
      <form
        ref={form}
        onSubmit={(event) => {
          event.preventDefault()
          void start()
        }}
      >
        <p class="caption run-below">
          Below <q dir="auto">{oneLine(text, 72)}</q>
        </p>
        <div class="strategies" role="radiogroup" aria-label="Strategy">
          {strategies.value.map((each) => (
            <label key={each.name} class="strategy">
              <input
                type="radio"
                name="strategy"
                value={each.name}
                checked={chosen?.name === each.name}
                onChange={() => {
                  setWrong(null)
                  last.value = each.name
                }}
              />
              <span>{strategyTitle(each.name)}</span>
              <span class="caption">{each.says}</span>
            </label>
          ))}
        </div>
        {chosen && (
          <div class="run-fields">
            {chosen.breadth && field('breadth', capital(chosen.breadth), byDefault(chosen.breadth_default))}
            {chosen.n && field('n', capital(chosen.n), byDefault(chosen.n_default))}
            {field(
              'budget_tokens',
              'Token budget',
              'no limit',
              'The search ends after this many generated tokens.',
            )}
            {field('budget_s', 'Time budget (s)', 'no limit', 'The search ends after this time.')}
            {!chosen.refused?.includes('temperature') && field('temperature', 'Temperature', 'default')}
            {field(
              'max_tokens',
              `Max tokens per ${ANSWERING.has(chosen.name) ? 'answer' : 'step'}`,
              'default',
            )}
            {field('seed', 'Seed', 'random', `The same seed gives the same search, but ${SEED_EXCEPTIONS}.`)}
          </div>
        )}
        {chosen && <AnswerFields loom={loom} wrong={wrong} onInput={() => setWrong(null)} />}
        <footer class="row">
          <p class="grow error">
            {isReadOnly.value
              ? `Read-only: load ${shortName(loom.info.value.model)} to search.`
              : wrong?.field === ''
                ? wrong.message
                : ''}
          </p>
          <TextButton onClick={closeOverlay}>Cancel</TextButton>
          <TextButton kind="main" type="submit" disabled={!chosen || isBusy || isReadOnly.value}>
            Start
          </TextButton>
        </footer>
      </form>
    </Dialog>
  )
}

const byDefault = (value: number | null | undefined) =>
  value == null ? 'depends on the prompt' : String(value)
const capital = (text: string) => text.charAt(0).toUpperCase() + text.slice(1)
/** The field that a message begins with, where the error does not name it otherwise. */
const firstWord = (message: string) => /^(\w+) /.exec(message)?.[1] ?? null

interface FieldError {
  field: string
  message: string
}
type ReadRequest = { request: RunRequest; wrong: null } | { request: null; wrong: FieldError }

/** The request, or the error of a field. */
function read(strategy: Strategy, node: number, loom: OpenLoom): ReadRequest {
  const request: RunRequest = { strategy: strategy.name, node, ...answerRequest(loom) }
  const skipped = new Set<string>(strategy.refused)
  if (!strategy.breadth) skipped.add('breadth')
  if (!strategy.n) skipped.add('n')
  for (const field of NUMBERS) {
    const text = (typed.peek()[field] ?? '').trim().replace(',', '.')
    if (text === '' || skipped.has(field)) continue
    const value = Number(text)
    if (!Number.isFinite(value))
      return { request: null, wrong: { field, message: 'Enter a number, or leave it empty.' } }
    request[field] = value
  }
  return { request, wrong: null }
}
