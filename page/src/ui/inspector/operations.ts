/** Labels of a loom's operations: what was done, where and when. */

const DID: Record<string, string> = {
  grow: 'grown',
  run: 'found by a search, begun',
  add: 'written',
  fork: 'forked',
  edit: 'edited',
  copy: 'copied',
  create: 'begun',
  import: 'imported',
  split: 'split off',
  clip: 'cut off',
  merge: 'merged',
  move: 'moved',
  remove: 'removed',
  bookmark: 'bookmarked',
}
const BY: Record<string, string> = { page: 'on the page', http: 'by a program', cli: 'in a terminal' }

/** "grown on the page": what an operation did, and where. */
export function cameBy(kind: string, actor: string): string {
  const by = actor === '' ? '' : (BY[actor] ?? `by ${actor}`)
  return `${DID[kind] ?? kind} ${by}`.trim()
}

export const moment = (at: string): string =>
  new Date(at).toLocaleString(undefined, { dateStyle: 'medium', timeStyle: 'short' })
