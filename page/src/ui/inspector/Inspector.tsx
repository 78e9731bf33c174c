/** What one sets and sees beside the text. */
import { useEffect, useRef } from 'preact/hooks'
import { provide } from '../../state/handlers'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { type InspectorTab, inspect, inspectorTab } from '../../state/view'
import { RunTab } from '../run/RunTab'
import { GenerateTab } from './GenerateTab'
import { LoomTab } from './LoomTab'
import { NodeTab } from './NodeTab'
import { TokensTab } from './TokensTab'
import './inspector.css'

const TABS = { generate: 'Generate', tokens: 'Tokens', node: 'Node', loom: 'Loom', run: 'Solve' } as const
const PANELS = { generate: GenerateTab, tokens: TokensTab, node: NodeTab, loom: LoomTab, run: RunTab }

export function Inspector({ loom }: { loom: OpenLoom }) {
  const hasRun = loom.runs.value.length > 0
  const tabs = (Object.keys(TABS) as InspectorTab[]).filter((each) => each !== 'run' || hasRun)
  const chosen = tabs.includes(inspectorTab.value) ? inspectorTab.value : 'generate'
  const before = useRef<InspectorTab>('generate')
  const list = useRef<HTMLDivElement>(null)
  useEffect(
    () =>
      provide('nextMode', () => {
        const now = inspectorTab.peek()
        if (now !== 'tokens') before.current = now
        inspect(now === 'tokens' ? before.current : 'tokens')
      }),
    [],
  )
  const Panel = PANELS[chosen]
  const step = (event: KeyboardEvent) => {
    const at = tabs.indexOf(chosen)
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key]
    if (to === undefined) return
    event.preventDefault()
    event.stopPropagation()
    inspectorTab.value = tabs[(to + tabs.length) % tabs.length]!
    queueMicrotask(() => list.current?.querySelector<HTMLElement>('[aria-selected=true]')?.focus())
  }
  return (
    <div class="inspector">
      <div class="tabs inspector-tabs" role="tablist" aria-label="Inspector" ref={list} onKeyDown={step}>
        {tabs.map((each) => (
          <button
            key={each}
            type="button"
            role="tab"
            id={`tab-${each}`}
            aria-selected={each === chosen}
            aria-controls="inspector-panel"
            tabIndex={each === chosen ? 0 : -1}
            title={each === 'tokens' ? `One token at a time  ${keyFor('next-token')}` : undefined}
            onClick={() => (inspectorTab.value = each)}
          >
            {TABS[each]}
          </button>
        ))}
      </div>
      <div class="inspector-panel" id="inspector-panel" role="tabpanel" aria-labelledby={`tab-${chosen}`}>
        <Panel loom={loom} key={chosen} />
      </div>
    </div>
  )
}
