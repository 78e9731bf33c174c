/** Texts that somebody is writing, kept by the browser until they are saved or thrown away. */
import { signal } from '@preact/signals'
import { isObject, isString, listOf, read, write } from './kept'

export interface Draft {
  /** edit: of that node's text; child: of a text below it. */
  kind: 'edit' | 'child'
  node: number
  text: string
  /** What the node said when it was opened. */
  base: string
  /** The loom's revision then: a later change of the node is a conflict. */
  rev: number
  isMessage: boolean
  /** How it is saved unless somebody says otherwise. */
  inPlace: boolean
  isOpen: boolean
}

export class Drafts {
  readonly all

  constructor(private readonly loom: string) {
    this.all = signal<readonly Draft[]>(read<Draft[]>(this.name, [], listOf(isDraft)))
  }

  private get name(): string {
    return `drafts.${this.loom}`
  }

  /** The one that is being written now. */
  get open(): Draft | null {
    return this.all.value.find((each) => each.isOpen) ?? null
  }

  find(kind: Draft['kind'], node: number): Draft | undefined {
    return this.all.peek().find((each) => each.kind === kind && each.node === node)
  }

  /** Begin, or go on with what was kept. One is open at a time. */
  begin(fresh: Omit<Draft, 'isOpen' | 'text'>): Draft {
    const kept = this.find(fresh.kind, fresh.node)
    const draft = { text: fresh.base, ...fresh, ...kept, inPlace: fresh.inPlace, isOpen: true }
    this.close()
    this.keep([...this.all.peek().filter((each) => !isSame(each, draft)), draft])
    return draft
  }

  change(draft: Draft, changes: Partial<Draft>): void {
    this.keep(this.all.peek().map((each) => (isSame(each, draft) ? { ...each, ...changes } : each)))
  }

  /** Leave what is open; what was changed stays as a draft. */
  close(): void {
    this.keep(
      this.all
        .peek()
        .filter((each) => !each.isOpen || each.text !== each.base)
        .map((each) => ({ ...each, isOpen: false })),
    )
  }

  drop(draft: Draft): void {
    this.keep(this.all.peek().filter((each) => !isSame(each, draft)))
  }

  private keep(drafts: readonly Draft[]): void {
    this.all.value = drafts
    write(this.name, drafts)
  }
}

const isDraft = (kept: unknown): kept is Draft =>
  isObject(kept) &&
  (kept['kind'] === 'edit' || kept['kind'] === 'child') &&
  Number.isInteger(kept['node']) &&
  isString(kept['text']) &&
  isString(kept['base'])

const isSame = (one: Draft, other: Draft) => one.kind === other.kind && one.node === other.node
