/** Ask before a change that is hard to undo. */
import { signal } from '@preact/signals'

export interface Question {
  title: string
  text: string
  yes: string
  answer: (yes: boolean) => void
}

export const question = signal<Question | null>(null)

/** Ask something that cannot be taken back lightly. */
export function confirm(title: string, text: string, yes: string): Promise<boolean> {
  return new Promise((resolve) => {
    question.value = {
      title,
      text,
      yes,
      answer: (isConfirmed) => {
        question.value = null
        resolve(isConfirmed)
      },
    }
  })
}
