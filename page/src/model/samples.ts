/** Prompts for a first loom that the loaded model continues well. */
import type { Model } from '../api/client'

/** The embedded model was trained on these kinds of questions. */
const TINY = [
  'Tell me a story about a fox.',
  'Use 4 9 10 13 to make 24.',
  'Describe Lena the owl as JSON.',
  'What is 37 + 58?',
]
const CHAT = [
  'Write the opening of a story in which everyone lies.',
  'Name five ways to cross a river without a bridge.',
  'Explain to a child why the sea is salty.',
  'Describe a lighthouse at night, in one paragraph.',
]
const RAW = [
  'The lighthouse keeper had not spoken to anyone since the storm took',
  'The recipe had been in the family for six generations. It began:',
  'Q: Why is the sea salty?\nA:',
  'Dear editor,',
]

/** The prompt that stands in the box first, and three others. */
export function samples(
  model: Pick<Model, 'source' | 'has_chat_template'> | null,
  isChat: boolean,
): { first: string; others: string[] } {
  const [first, ...others] = !model || model.source === 'tiny' ? TINY : isChat ? CHAT : RAW
  return { first: first!, others }
}
