/** One row of the outline. What grows on it is painted here, and nowhere else. */
import { Bookmark, Sprout, Trash2 } from 'lucide-preact'
import { indent } from '../../model/guides'
import { parseNumber } from '../../model/heat'
import { kvStateText, spokenKvState } from '../../model/kv_state'
import { label, marks, meanP, spokenLabel } from '../../model/label'
import type { Row } from '../../model/outline'
import { ROOT } from '../../model/tree'
import { formatCount, shortName } from '../../model/words'
import { keyFor } from '../../state/keys'
import { kvStates } from '../../state/kvStates'
import type { OpenLoom } from '../../state/loom'
import { KvDot, MarkSign, ProbabilityBar, Rating, Score } from './Marks'

interface RowProps {
  loom: OpenLoom
  row: Row
  /** The node that it shows. */
  node: number
  isCurrent: boolean
  isSelected: boolean
  isUnread: boolean
  /** It is pointed at: what can be done with it is there. */
  isPointed: boolean
  /** In a tree of hits: it is one of them. */
  isHit: boolean | null
  /** The tree's version: nodes change in place. */
  version: number
}

/** The id of a row's element. */
export const rowId = (node: number) => `row-${node}`

export function OutlineRow({
  loom,
  row,
  node: number,
  isCurrent,
  isSelected,
  isUnread,
  isPointed,
  isHit,
}: RowProps) {
  loom.lanes.value.get(number)?.version.value
  const node = loom.tree.get(number)
  if (!node) return null
  const { prompt, chat_template_used } = loom.info.value
  const line = label(node, prompt, chat_template_used ?? false)
  const end = row.chain[row.chain.length - 1]!
  const signs = marks(node)
  const score = parseNumber(node.score)
  const isLeft = loom.pruned.value.has(number)
  const kv = kvStates.value.get(number)
  const hidden = row.isFolded ? loom.tree.below(end) : 0
  return (
    <div
      id={rowId(number)}
      role="treeitem"
      class={`tree-row${isHit === false || isLeft ? ' dim' : ''}`}
      data-node={number}
      data-nodes={(row.same.length ? row.same : row.chain).join(' ')}
      data-same={row.same.length > 0 || undefined}
      draggable={number !== ROOT}
      aria-level={row.depth + 1}
      aria-expanded={row.isFolded === null ? undefined : !row.isFolded}
      aria-current={isCurrent ? 'true' : undefined}
      aria-selected={isSelected}
      aria-posinset={row.at}
      aria-setsize={row.of}
      aria-label={spokenLabel(node, line, row.nChildren, isUnread, row.same.length)}
      aria-description={spokenKvState(kv)}
      style={{ paddingLeft: `${indent(row.depth)}px` }}
    >
      <NodeDot row={row} isCurrent={isCurrent} isUnread={isUnread} />
      <span
        class={`row-words cut${line.isNote ? ' row-note' : ''}`}
        dir="auto"
        title={
          isPointed
            ? `${label(node, prompt, chat_template_used ?? false, 400).text}${kv ? `\n\n${kvStateText(kv)}` : ''}`
            : undefined
        }
      >
        {line.text}
      </span>
      {row.chain.length > 1 && <Chain loom={loom} chain={row.chain} shown={number} />}
      <span class="row-signs">
        {node.model && (
          <span class="row-model cut" title={`Grown with ${shortName(node.model)}`}>
            {shortName(node.model)}
          </span>
        )}
        {signs.map((each) => (
          <MarkSign key={each} mark={each} />
        ))}
        {node.rating != null && <Rating rating={node.rating} />}
        {row.same.length > 1 && (
          <button type="button" class="row-times" data-do="same" tabIndex={-1} title="Show all">
            ×{row.same.length}
          </button>
        )}
        {score === null ? <ProbabilityBar p={meanP(node)} /> : <Score score={score} isLeft={isLeft} />}
        <span class="row-number" title={row.nChildren ? undefined : 'No children'}>
          {hidden ? `+${formatCount(hidden)}` : row.nChildren || null}
        </span>
      </span>
      {isPointed && (
        <span class="row-actions">
          <RowAction what="grow" label="Grow branches" icon={Sprout} />
          <RowAction what="bookmark" label="Bookmark" icon={Bookmark} />
          {number !== ROOT && <RowAction what="remove" label="Remove" icon={Trash2} />}
        </span>
      )}
      {kv && <KvDot kv={kv} />}
    </div>
  )
}

function RowAction({ what, label: name, icon: Icon }: { what: string; label: string; icon: typeof Sprout }) {
  const key = keyFor(what)
  return (
    <button
      type="button"
      class="icon-button"
      data-do={what}
      tabIndex={-1}
      aria-label={name}
      title={key ? `${name}  ${key}` : name}
    >
      <Icon size={14} aria-hidden />
    </button>
  )
}

/**
 * The start of branches: a ring, full while they are folded, full in the accent at the current node.
 * An unvisited node has a dot.
 */
function NodeDot({ row, isCurrent, isUnread }: { row: Row; isCurrent: boolean; isUnread: boolean }) {
  const canFold = row.isFolded !== null && row.depth > 0
  const kind = `row-knot${row.isFolded === null ? ' leaf' : ''}${row.isFolded ? ' folded' : ''}${isCurrent ? ' here' : isUnread ? ' unread' : ''}`
  if (!canFold) return <span class={kind} aria-hidden />
  return (
    <button
      type="button"
      class={kind}
      data-do="fold"
      tabIndex={-1}
      aria-label={row.isFolded ? 'Unfold' : 'Fold'}
      title={`${row.isFolded ? 'Unfold' : 'Fold'}  ${keyFor('collapse')}`}
    />
  )
}

const DOTS = 5

/** Nodes that share a row: a dot each, or which of how many. */
function Chain({ loom, chain, shown }: { loom: OpenLoom; chain: readonly number[]; shown: number }) {
  const place = chain.indexOf(shown)
  if (chain.length > DOTS) {
    return (
      <span class="row-chain caption" title="Nodes without siblings share a row">
        {place + 1}/{chain.length}
      </span>
    )
  }
  return (
    <span class="row-chain" title="Nodes without siblings share a row">
      {chain.map((each) => (
        <button
          key={each}
          type="button"
          class={`row-bead${each === shown ? ' shown' : ''}${loom.isUnread(each) ? ' new' : ''}`}
          data-do="go"
          data-to={each}
          tabIndex={-1}
          aria-label={`Node ${chain.indexOf(each) + 1} of ${chain.length}`}
        />
      ))}
    </span>
  )
}
