/** The operations of a loom's log, in words: what Undo would take back. */
import { plural } from './words'

export interface Operation {
  kind: string
  n_added: number
  n_changed: number
  n_removed: number
  state: string
}

const VERBS: Record<string, string> = {
  grow: 'growth of',
  run: 'search',
  add: 'adding',
  say: 'adding',
  edit: 'edit of',
  remove: 'removal of',
  fork: 'fork of',
  split: 'split of',
  merge: 'merge of',
  clip: 'cut of',
  move: 'move of',
  copy: 'copy of',
  bookmark: 'bookmark',
  score: 'score',
  rating: 'rating',
  note: 'note',
  author_note: 'author’s note',
  restore: 'restoring',
}
/** Kinds that are named without a number of nodes. */
const WITHOUT_COUNT = ['bookmark', 'run', 'score', 'rating', 'note', 'author_note']

/** "removal of 3 nodes". */
export function operationText(operation: Operation): string {
  const n = Math.max(operation.n_added, operation.n_removed) || operation.n_changed
  const verb = VERBS[operation.kind] ?? operation.kind
  return WITHOUT_COUNT.includes(operation.kind) || !n
    ? verb.replace(/ of$/, '')
    : `${verb} ${plural(n, 'node')}`
}

/** The operations that Undo and Redo would revert; the list may have any order. */
export function nextOperations(operations: readonly (Operation & { rev: number })[]): {
  undo: string | null
  redo: string | null
} {
  const byAge = [...operations].sort((a, b) => a.rev - b.rev)
  const undo = byAge.findLast((each) => each.state === 'done')
  const redo = byAge.find((each) => each.state === 'undone')
  return { undo: undo ? operationText(undo) : null, redo: redo ? operationText(redo) : null }
}
