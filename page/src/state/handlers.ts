/** Actions that a mounted view provides to keys, menus and other state: editor, card, search, map. */

export interface Handlers {
  edit(inPlace: boolean): void
  writeChild(): void
  splitHere(andChild: boolean): void
  clipHere(drops: boolean): void
  alternative(by: 1 | -1): void
  takeAlternative(): boolean
  search(): void
  hit(by: 1 | -1): boolean
  fit(isAll: boolean): void
  /** Close the topmost open thing. Returns false if nothing is open. */
  closeTop(): boolean
  /** Act on the selected nodes. Returns false if no node is selected. */
  withSelected(verb: 'grow' | 'remove'): boolean
  select(what: 'here' | 'leaves' | 'bookmarks'): void
  menu(): void
  move(): void
  /** Put the moved node below the current one. Returns false if no node is being moved. */
  place(): boolean
  showBookmarks(): void
  nextMode(): void
  /** Handle a digit before it selects a child. Returns true if it was handled. */
  digit(k: number): boolean
  /** Copy a node's text into a new loom. */
  hoistAway(node: number): void
  /** Prepare the animation of a removal. Returns what plays it. */
  removing(tops: number[]): () => void
}
type Id = keyof Handlers

const stacks = new Map<Id, unknown[]>()

/** Call the newest provided function of an action; undefined without a provider. */
export function call<Each extends Id>(
  id: Each,
  ...given: Parameters<Handlers[Each]>
): ReturnType<Handlers[Each]> | undefined {
  const fn = stacks.get(id)?.at(-1) as
    | ((...given: Parameters<Handlers[Each]>) => ReturnType<Handlers[Each]>)
    | undefined
  return fn?.(...given)
}

/** Handle an action with `fn`. Returns an undo, after which the handler before it acts. */
export function provide<Each extends Id>(id: Each, fn: Handlers[Each]): () => void {
  const stack = stacks.get(id) ?? []
  stacks.set(id, [...stack, fn])
  return () => {
    stacks.set(
      id,
      stacks.get(id)!.filter((each) => each !== fn),
    )
  }
}

/** Handle several actions. Returns the undo of them all. */
export function provideAll(functions: Partial<Handlers>): () => void {
  const undos = (Object.keys(functions) as Id[]).map((id) => provide(id, functions[id]!))
  return () => {
    for (const undo of undos) undo()
  }
}
