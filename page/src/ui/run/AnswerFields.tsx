/** How a search reads an answer in a text, checks it and judges it. */
import { signal } from '@preact/signals'
import type { RunRequest } from '../../api/client'
import type { OpenLoom } from '../../state/loom'
import { RunField } from './RunField'

export const ANSWER_FIELDS = ['answer', 'check', 'judge'] as const
type Name = (typeof ANSWER_FIELDS)[number]

const READERS = {
  '': 'Automatically',
  last_number: 'Last number',
  last_line: 'Last line',
  regex: 'Regular expression',
}
type Reader = keyof typeof READERS

interface Answers {
  reader: Reader
  answer: string
  check: string
  judge: string
}
const NONE: Answers = { reader: '', answer: '', check: '', judge: '' }
/** By loom: a check belongs to one question, so that it must not apply to the next loom. */
const byLoom = signal<ReadonlyMap<string, Answers>>(new Map())
const of = (loom: OpenLoom): Answers => byLoom.value.get(loom.id) ?? NONE

/** The fields of the request. */
export function answerRequest(loom: OpenLoom): Pick<RunRequest, Name> {
  const { reader, answer, check, judge } = of(loom)
  const read = reader === 'regex' ? answer : reader
  return {
    ...(read ? { answer: read } : {}),
    ...(check.trim() ? { check } : {}),
    ...(judge.trim() ? { judge } : {}),
  }
}

interface AnswerFieldsProps {
  loom: OpenLoom
  wrong: { field: string; message: string } | null
  onInput: () => void
}

export function AnswerFields({ loom, wrong, onInput }: AnswerFieldsProps) {
  const now = of(loom)
  const isWrong = wrong !== null && ANSWER_FIELDS.some((name) => name === wrong.field)
  const set = (to: Partial<Answers>) => {
    onInput()
    byLoom.value = new Map(byLoom.peek()).set(loom.id, { ...now, ...to })
  }
  const field = (name: Name, label: string, placeholder: string, hint: string) => (
    <RunField
      name={name}
      label={label}
      placeholder={placeholder}
      hint={hint}
      wrong={wrong?.field === name ? wrong.message : ''}
      value={now[name]}
      isText
      onInput={(value) => set({ [name]: value })}
    />
  )
  return (
    <details class="run-answers" open={isWrong || now !== NONE}>
      <summary>Read, check and judge answers</summary>
      <div class="run-fields">
        <div class="run-field">
          <label for="run-reader">Read the answer</label>
          <select
            id="run-reader"
            class="field"
            value={now.reader}
            onChange={(event) => set({ reader: event.currentTarget.value as Reader })}
          >
            {Object.entries(READERS).map(([value, label]) => (
              <option key={value} value={value}>
                {label}
              </option>
            ))}
          </select>
        </div>
        {now.reader === 'regex' &&
          field('answer', 'Answer expression', 'answer: (.*)', 'The first group of its last match.')}
        {field(
          'check',
          'Correct answer',
          'not checked',
          'A regular expression. An answer is correct if all of it matches.',
        )}
        <div class="run-field is-wide">
          <label for="run-judge">Question to the model about each answer</label>
          <textarea
            id="run-judge"
            class="field"
            rows={2}
            placeholder="Question: {prompt} Is {answer} right?"
            value={now.judge}
            aria-invalid={wrong?.field === 'judge'}
            aria-describedby="run-judge-says"
            onInput={(event) => set({ judge: event.currentTarget.value })}
          />
          <p class="caption" id="run-judge-says">
            {wrong?.field === 'judge' ? (
              <span class="error">{wrong.message}</span>
            ) : (
              'The probability of “yes” scores the answer. {text}, {answer} and {prompt} are filled in.'
            )}
          </p>
        </div>
      </div>
    </details>
  )
}
