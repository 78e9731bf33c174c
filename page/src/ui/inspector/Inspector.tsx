/** Settings and facts next to the text: growth, tokens, the node, the loom, a search. */
import { useEffect, useRef } from 'preact/hooks'
import { provide } from '../../state/handlers'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { type InspectorTab, inspect, inspectorTab } from '../../state/view'
import { RunTab } from '../run/RunTab'
import { TabPanel, Tabs } from '../Tabs'
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
  return (
    <div class="inspector">
      <Tabs
        class="inspector-tabs"
        label="Inspector"
        tabs={tabs.map((value) => ({
          value,
          label: TABS[value],
          panel: 'inspector-panel',
          title: value === 'tokens' ? `One token at a time  ${keyFor('next-token')}` : undefined,
        }))}
        chosen={chosen}
        onChoose={(tab) => (inspectorTab.value = tab)}
      />
      <TabPanel id="inspector-panel" class="inspector-panel" tab={chosen}>
        <Panel loom={loom} key={chosen} />
      </TabPanel>
    </div>
  )
}
