/** Unsaved texts, stored by the browser until they are saved or discarded. */
import { signal } from '@preact/signals'
import { isObject, isString, listOf, onOtherTab, read, readOwn, write, writeOwn } from './storage'

export interface Draft {
  /** edit: of that node's text; child: of a text below it. */
  kind: 'edit' | 'child'
  node: number
  text: string
  /** The node's text when the draft was opened. */
  base: string
  /** The loom's revision then: a later change of the node is a conflict. */
  rev: number
  isMessage: boolean
  /** Save in place by default. */
  inPlace: boolean
  /** It is being written in this tab. */
  isOpen: boolean
  /** The node that it was of went meanwhile: it waits where that hung. */
  isStray?: boolean
}
type Place = Pick<Draft, 'kind' | 'node'>
type List = readonly Draft[]

/** The tabs of a browser share the stored drafts: each changes only its own. */
export class Drafts {
  readonly all
  /** Call this once the loom is closed. */
  readonly end: () => void

  constructor(private readonly loom: string) {
    const open = readOwn<Place | null>(this.name, null, (kept) => (isPlace(kept) ? kept : null))
    this.all = signal<List>(
      this.stored
        .map((each) => ({ ...each, isOpen: open !== null && isSame(each, open) }))
        .filter((each) => each.isOpen || each.text !== each.base),
    )
    this.end = onOtherTab(this.name, () => {
      const mine = this.open
      this.all.value = mine ? put(this.stored, mine) : this.stored
    })
  }

  private get name(): string {
    return `drafts.${this.loom}`
  }

  private get stored(): List {
    return read<Draft[]>(this.name, [], listOf(isDraft)).map((each) => ({ ...each, isOpen: false }))
  }

  /** The one that is being written now. */
  get open(): Draft | null {
    return this.all.value.find((each) => each.isOpen) ?? null
  }

  find(kind: Draft['kind'], node: number): Draft | undefined {
    return this.all.peek().find((each) => isSame(each, { kind, node }))
  }

  /** Begin, or go on with what was kept. One is open at a time. */
  begin(fresh: Omit<Draft, 'isOpen' | 'text'>): Draft {
    const kept = this.find(fresh.kind, fresh.node)
    const draft = { text: fresh.base, ...fresh, ...kept, inPlace: fresh.inPlace, isOpen: true }
    this.close()
    this.keep((all) => put(all, draft))
    return draft
  }

  change(draft: Draft, changes: Partial<Draft>): void {
    const now = this.find(draft.kind, draft.node) ?? draft
    this.keep((all) => put(all, { ...now, ...changes }))
  }

  /** Leave what is open; what was changed stays as a draft. */
  close(): void {
    const open = this.all.peek().find((each) => each.isOpen)
    if (!open) return
    if (open.text === open.base) this.drop(open)
    else this.keep((all) => put(all, { ...open, isOpen: false }))
  }

  drop(draft: Draft): void {
    this.keep((all) => all.filter((each) => !isSame(each, draft)))
  }

  /** Go on writing below another node. */
  move(draft: Draft, node: number): void {
    this.keep((all) =>
      put(
        all.filter((each) => !isSame(each, draft)),
        { ...draft, node },
      ),
    )
  }

  /** A node has gone: what was written at it is to stand below another one. */
  stray(node: number, to: number): void {
    for (const draft of this.all.peek().filter((each) => each.node === node)) {
      const there = this.find('child', to)
      const text = there?.text ? `${there.text}\n\n${draft.text}` : draft.text
      const moved = {
        ...draft,
        kind: 'child' as const,
        node: to,
        text,
        base: '',
        inPlace: false,
        isStray: true,
      }
      this.keep((all) =>
        put(
          all.filter((each) => !isSame(each, draft)),
          moved,
        ),
      )
    }
  }

  /** Change what is known here and what is kept alike: other tabs keep theirs there. */
  private keep(change: (all: List) => List): void {
    this.all.value = change(this.all.peek())
    write(
      this.name,
      change(this.stored).map((each) => ({ ...each, isOpen: false })),
    )
    const open = this.all.peek().find((each) => each.isOpen)
    writeOwn(this.name, open ? { kind: open.kind, node: open.node } : null)
  }
}

const isPlace = (kept: unknown): kept is Place => isObject(kept) && isOfNode(kept)

const isDraft = (kept: unknown): kept is Draft =>
  isObject(kept) && isOfNode(kept) && isString(kept['text']) && isString(kept['base'])

const isOfNode = (kept: Record<string, unknown>) =>
  (kept['kind'] === 'edit' || kept['kind'] === 'child') && Number.isInteger(kept['node'])

const isSame = (one: Place, other: Place) => one.kind === other.kind && one.node === other.node

/** In its place, or as the last. */
const put = (all: List, draft: Draft): List =>
  all.some((each) => isSame(each, draft))
    ? all.map((each) => (isSame(each, draft) ? draft : each))
    : [...all, draft]
