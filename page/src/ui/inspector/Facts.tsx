/** Names and values, one a line. A value that is not known yet keeps its place. */
import type { ComponentChildren } from 'preact'

export interface Fact {
  name: string
  value: ComponentChildren
  /** The tooltip: the meaning of the name. */
  hint?: string
  varies?: boolean
}

export function Facts({ of }: { of: (Fact | null | false)[] }) {
  const rows = of.filter((each): each is Fact => !!each)
  return (
    <dl class="facts">
      {rows.map((each) => (
        <div key={each.name} class="fact">
          <dt title={each.hint}>{each.name}</dt>
          <dd data-varies={each.varies ? '' : undefined}>{each.value ?? '…'}</dd>
        </div>
      ))}
    </dl>
  )
}
