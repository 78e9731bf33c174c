/** The label of a node on one line: its first words, or why it has none. */
import type { Node } from '../api/client'
import { scoreText } from './run'
import { isHuman, ROOT } from './tree'
import { beginning, finishWord, oneLine, plural, probability, shortName, showWhitespace } from './words'

export interface Label {
  text: string
  /** The words are the page's, not the node's. */
  isNote: boolean
}

const SPECIAL = /<\|[^|<>]{1,40}\|>|<(?:start|end)_of_turn>(?:user|model)?|<\/?s>|\[\/?INST\]/g

const BEGINS = /^(?:<\|[^|<>]{1,40}\|>|<s>)+/

/** A node's own text, without what the template of a chat puts around it, or a model before all text. */
export function plainText(node: Node, prompt: string, isChat: boolean): string {
  if (node.node === ROOT) {
    if (isChat || (prompt && node.text.endsWith(prompt))) return prompt
    return node.text.replace(BEGINS, '')
  }
  if (!isChat) return node.text
  return node.said ?? node.text.replace(SPECIAL, '')
}

export function label(node: Node, prompt: string, isChat: boolean, maxLength = 80): Label {
  const text = plainText(node, prompt, isChat)
  const line = oneLine(text, maxLength)
  if (line) return { text: line, isNote: false }
  if (text) return { text: showWhitespace(beginning(text, 24)), isNote: true }
  if (node.growing) return { text: 'growing', isNote: true }
  return { text: emptyLabel(node.ended), isNote: true }
}

/** The label of an empty text. */
export const emptyLabel = (hasEnded: boolean): string => (hasEnded ? '(ended immediately)' : '(empty)')

/** The geometric mean of the probabilities of a node's tokens. */
export function meanP(node: Node): number | null {
  return typeof node.mean_logprob === 'number' ? Math.exp(node.mean_logprob) : node.mean_p
}

export type Mark = 'bookmark' | 'growing' | 'failed' | 'stopped' | 'ended' | 'human'

/** The marks after a node's words. */
export function marks(node: Node): Mark[] {
  const marks: Mark[] = []
  if (node.bookmark != null) marks.push('bookmark')
  if (node.growing) marks.push('growing')
  else if (node.finish_reason === 'error') marks.push('failed')
  else if (node.finish_reason === 'cancelled' || node.finish_reason === 'interrupted') marks.push('stopped')
  else if (node.ended) marks.push('ended')
  else if (isHuman(node) && node.score == null) marks.push('human') // a search scores what it writes
  return marks
}

export const MARK_WORDS: Record<Mark, string> = {
  bookmark: 'bookmarked',
  growing: 'growing',
  failed: 'failed',
  stopped: 'stopped',
  ended: 'ended',
  human: 'written by hand',
}

/** A row as a screen reader says it. */
export function spokenLabel(
  node: Node,
  line: Label,
  nChildren: number,
  isUnread: boolean,
  times: number,
): string {
  const p = meanP(node)
  return [
    line.text,
    times > 1 ? `${times} times` : '',
    nChildren ? plural(nChildren, 'child', 'children') : '',
    ...marks(node).map((each) => MARK_WORDS[each]),
    node.bookmark ? `label ${node.bookmark}` : '',
    node.rating == null ? '' : `rated ${node.rating}`,
    node.model ? `grown with ${shortName(node.model)}` : '',
    isUnread ? 'unread' : '',
    typeof node.score === 'number' ? `score ${scoreText(node.score)}` : '',
    p === null ? '' : `average probability ${probability(p)}`,
    node.finish_reason && node.finish_reason !== 'stop' ? finishWord(node.finish_reason) : '',
  ]
    .filter(Boolean)
    .join(', ')
}
