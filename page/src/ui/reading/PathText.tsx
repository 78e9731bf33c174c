/** The text from the prompt to the current node, as one. */
import { computed } from '@preact/signals'
import { useMemo, useRef } from 'preact/hooks'
import { hasMarkdown } from '../../model/markdown'
import { segments } from '../../model/segments'
import { isHuman } from '../../model/tree'
import { shownText, type Turn, turnsOf } from '../../model/turns'
import type { Draft } from '../../state/drafts'
import type { OpenLoom } from '../../state/loom'
import { cursor, showsSpecial } from '../../state/reading'
import { heatMode } from '../../state/view'
import { Editor } from './Editor'
import { NodeText } from './NodeText'
import { isMarkdownShown, latestText, Rendered } from './Rendered'
import { useFlow } from './useFlow'

const LABELS = { you: 'You', prompt: 'Prompt', model: 'Answer', text: undefined } as const

export function PathText({ loom, path }: { loom: OpenLoom; path: number[] }) {
  const { tree } = loom
  const info = loom.info.value
  const special = showsSpecial.value
  const turns = turnsOf(tree, path, info.chat_template_used === true && !special)
  const draft = loom.drafts.open
  const textOf = (number: number) => shownText(tree.get(number)!, info, special)
  const element = useRef<HTMLElement>(null)
  useFlow(element)
  const edited = draft?.kind === 'edit' && path.includes(draft.node) ? draft : null
  const isMarkdown = isMarkdownShown(loom) && edited === null
  // The token view is exact: the node at the token cursor is shown token by token.
  const pointed = cursor.value?.node
  const isExact = ({ who, nodes }: Turn) =>
    !isMarkdown || who === 'you' || who === 'prompt' || nodes.some((each) => each === pointed)
  return (
    <article
      ref={element}
      class="path"
      aria-label="Text of the path"
      data-tinted={heatMode.value !== 'off' || undefined}
    >
      {path.length === 0 && <Coming prompt={info.prompt} isChat={info.chat_template_used === true} />}
      {turns.map((turn) => (
        <div key={turn.nodes[0]} class={`turn ${turn.who}`} role="group" aria-label={LABELS[turn.who]}>
          <TurnText loom={loom} nodes={turn.nodes} textOf={textOf} edited={edited} isExact={isExact(turn)} />
        </div>
      ))}
    </article>
  )
}

interface TurnTextProps {
  loom: OpenLoom
  nodes: readonly number[]
  textOf: (number: number) => string
  edited: Draft | null
  isExact: boolean
}

/** The nodes of a turn: as one Markdown text if it has marks, else each by itself. */
function TurnText({ loom, nodes, textOf, edited, isExact }: TurnTextProps) {
  // A growing text gets its first mark between two renderings of the path.
  const hasMarks = useMemo(() => computed(() => hasMarkdown(latestText(loom, nodes, textOf))), [nodes])
  if (!isExact && hasMarks.value) return <Rendered loom={loom} nodes={nodes} textOf={textOf} />
  return (
    <>
      {segments(nodes.map(textOf)).map((run) => (
        <div key={nodes[run[0]!]} class="segment">
          {run.map((i) => {
            const number = nodes[i]!
            if (edited?.node === number) return <Editor key={`edit${number}`} loom={loom} draft={edited} />
            const node = loom.tree.get(number)!
            return (
              <NodeText
                key={number}
                loom={loom}
                number={number}
                text={textOf(number)}
                isHuman={node.parent === null || isHuman(node)}
              />
            )
          })}
        </div>
      ))}
    </>
  )
}

/** Until the nodes have come: the prompt is known already. */
function Coming({ prompt, isChat }: { prompt: string; isChat: boolean }) {
  const who = isChat ? 'you' : 'prompt'
  return (
    <div class={`turn ${who}`} role="group" aria-label={LABELS[who]}>
      <div class="segment">{prompt}</div>
    </div>
  )
}
