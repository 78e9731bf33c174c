/** The text from the prompt to the current node, as one. */
import { useRef } from 'preact/hooks'
import { hasMarkdown } from '../../model/markdown'
import { segments } from '../../model/segments'
import { isHuman } from '../../model/tree'
import { shownText, type Turn, turnsOf } from '../../model/turns'
import type { OpenLoom } from '../../state/loom'
import { cursor, showsSpecial } from '../../state/reading'
import { heatMode, showsMarkdown } from '../../state/view'
import { Editor } from './Editor'
import { NodeText } from './NodeText'
import { Rendered } from './Rendered'
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
  const isMarkdown = !special && heatMode.value === 'off' && showsMarkdown(loom.isChat)
  // The token view is exact: the node at the token cursor is shown token by token.
  const pointed = cursor.value?.node
  const isRendered = ({ who, nodes }: Turn) =>
    isMarkdown &&
    (who === 'model' || who === 'text') &&
    edited === null &&
    !nodes.some((each) => each === pointed) &&
    hasMarkdown(nodes.map(textOf).join(''))
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
          {isRendered(turn) ? (
            <Rendered loom={loom} nodes={turn.nodes} textOf={textOf} />
          ) : (
            segments(turn.nodes.map(textOf)).map((run) => (
              <div key={turn.nodes[run[0]!]} class="segment">
                {run.map((i) => {
                  const number = turn.nodes[i]!
                  if (edited?.node === number)
                    return <Editor key={`edit${number}`} loom={loom} draft={edited} />
                  const node = tree.get(number)!
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
            ))
          )}
        </div>
      ))}
    </article>
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
