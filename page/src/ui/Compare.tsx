/** Branches side by side: their settings, what they have in common, and which one to go to. */
import { useEffect, useState } from 'preact/hooks'
import { api, type Node } from '../api/client'
import { commonBeginning, comparedNodes } from '../model/compare'
import { emptyLabel, meanP } from '../model/label'
import { changedParams } from '../model/provenance'
import { shownText } from '../model/turns'
import { averageProbability, finishWord, plural, shortName } from '../model/words'
import type { OpenLoom } from '../state/loom'
import { open } from '../state/session'
import { failed } from '../state/toasts'
import { closeOverlay, Dialog } from './Dialog'
import './compare.css'

export function Compare() {
  const loom = open.value
  if (!loom) return null
  return <Columns loom={loom} />
}

function Columns({ loom }: { loom: OpenLoom }) {
  loom.tree.version.value
  const [numbers] = useState(() => comparedNodes(loom.tree, loom.current.peek(), loom.selected.peek()))
  const nodes = numbers.flatMap((each) => loom.tree.get(each) ?? [])
  const texts = nodes.map((each) => shownText(each, loom.info.value, false))
  const common = commonBeginning(texts)
  const pick = (node: number) => {
    loom.navigate(node)
    closeOverlay()
  }
  return (
    <Dialog title={`Compare ${plural(nodes.length, 'branch', 'branches')}`} width={2000} class="compare">
      <ol
        class="compared"
        aria-label="Branches"
        style={{ '--columns': nodes.length }}
        onKeyDown={(event) => {
          const node = nodes[Number(event.key) - 1]
          if (node) pick(node.node)
        }}
      >
        {nodes.map((node, i) => (
          <li key={node.node}>
            <button type="button" class="button" onClick={() => pick(node.node)}>
              <kbd>{i + 1}</kbd> Pick
            </button>
            <Settings loom={loom} node={node} />
            <p class="compared-text" dir="auto">
              <span class="common">{texts[i]!.slice(0, common)}</span>
              {texts[i]!.slice(common)}
              {!texts[i] && <span class="muted">{emptyLabel(node.ended)}</span>}
            </p>
          </li>
        ))}
      </ol>
    </Dialog>
  )
}

/** The settings of a branch that are not neutral, and how it ended. */
function Settings({ loom, node }: { loom: OpenLoom; node: Node }) {
  const [known, setKnown] = useState<Node | null>(null)
  useEffect(() => {
    api.node(loom.id, node.node, ['params']).then(setKnown, failed)
  }, [node.node])
  const p = meanP(node)
  const drawn = known?.params ? changedParams(known.params) : []
  const facts = [
    known?.params && shortName(node.model ?? loom.info.value.model),
    ...(known && !known.params ? ['written'] : drawn.map(([name, value]) => `${name} ${value}`)),
    plural(node.n_tokens, 'token'),
    p !== null && averageProbability(p),
    finishWord(node.finish_reason, node.stop_string),
  ]
  return <p class="caption">{facts.filter(Boolean).join(' · ')}</p>
}
