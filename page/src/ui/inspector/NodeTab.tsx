/** The node tab: facts, notes, actions, and the settings of its growth. */
import type { Node } from '../../api/client'
import { parseNumber } from '../../model/heat'
import { meanP } from '../../model/label'
import { isHuman, ROOT } from '../../model/tree'
import { finishWord, formatCount, probability } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import { sentence } from '../../state/toasts'
import { type Fact, Facts } from './Facts'
import { Kv, Notes, Shape } from './NodeParts'
import { Provenance } from './Provenance'
import { useNode } from './useNode'
import './node.css'

export function NodeTab({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const at = loom.current.value
  const [known, ask] = useNode(loom, at)
  loom.lanes.value.get(at)?.version.value // updates the facts during growth
  const node = loom.tree.get(at)
  if (!node) return <p class="part caption">No node is selected.</p>
  return (
    <>
      <section class="part" aria-label="Node properties">
        <h2>{at === ROOT ? 'The prompt' : `Node ${at}`}</h2>
        <Facts of={textFacts(loom, node, known)} />
      </section>
      <Notes node={node} known={known} onChange={ask} key={`notes-${at}`} />
      {at !== ROOT && known?.kv !== null && <Kv node={at} known={known} />}
      <Shape loom={loom} node={at} key={`shape-${at}`} />
      {/* Last: how many lines it has is known late, and nothing that can be pressed may move when they come. */}
      <Provenance loom={loom} node={node} known={known} />
    </>
  )
}

function textFacts(loom: OpenLoom, node: Node, known: Node | null): (Fact | false)[] {
  const isChat = loom.info.value.chat_template_used ?? false
  const entropies = (known?.entropies ?? []).map(parseNumber).filter((each) => each !== null)
  const mean = entropies.reduce((sum, each) => sum + each, 0) / entropies.length
  const score = parseNumber(node.score)
  return [
    { name: 'Tokens', value: formatCount(node.n_tokens) },
    {
      name: 'Characters',
      value: formatCount(Array.from(node.parent === null ? loom.info.value.prompt : node.text).length),
    },
    {
      name: 'Avg. probability',
      hint: 'The geometric mean of its tokens’ probabilities before sampling: exp(mean log-probability).',
      value: probability(meanP(node)),
    },
    {
      name: 'Avg. entropy',
      hint: 'Entropy of the model’s distribution before each token, in nats.',
      value: entropies.length ? `${Math.abs(mean).toFixed(2)} nats` : '–',
    },
    node.growing || node.finish_reason !== null
      ? {
          name: 'State',
          value: node.growing ? 'still growing' : finishWord(node.finish_reason, node.stop_string),
        }
      : false,
    node.error != null && { name: 'Error', value: sentence(node.error) },
    score !== null && { name: 'Score', hint: 'The node’s score in a search.', value: score.toPrecision(3) },
    isChat && { name: 'Turn', value: turn(node) },
  ]
}

function turn(node: Node): string {
  if (node.parent === null) return 'user (first message)'
  if (node.said != null) return 'user'
  return isHuman(node) ? 'assistant (written by you)' : 'assistant'
}
