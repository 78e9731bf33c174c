/** The search over the tree: words or a pattern, kinds of nodes, how likely they are; here or in all looms. */
import { CaseSensitive, ListTree, Regex, Rows3, X } from 'lucide-preact'
import { useLayoutEffect, useRef } from 'preact/hooks'
import { KINDS, type Kind } from '../../model/finding'
import { inPercent, plural } from '../../model/words'
import {
  change,
  closeSearch,
  everywhere,
  findEverywhere,
  hits,
  isSearching,
  navigateToHit,
  query,
  scope,
  shape,
} from '../../state/finding'
import type { OpenLoom } from '../../state/loom'
import { IconButton } from '../Button'
import { Choice } from '../Choice'
import { HitsEverywhere, HitsHere } from './Hits'
import { focusTree } from './rowEvents'

const WORDS: Record<Kind, string> = {
  bookmarked: 'Bookmarked',
  human: 'Written',
  model: 'Generated',
  ended: 'Ended',
  unread: 'Unread',
}

const SCOPES = [
  { value: 'loom', label: 'This loom' },
  { value: 'all', label: 'All looms' },
] as const

export function Search({ loom }: { loom: OpenLoom }) {
  const field = useRef<HTMLInputElement>(null)
  const isOpen = isSearching.value
  // At once: the next key is already typed into it.
  useLayoutEffect(() => {
    if (!isOpen) return
    field.current?.focus()
    field.current?.select()
  }, [isOpen])
  if (!isOpen) return null
  const { text, isRegex, isCase } = query.value
  const isAll = scope.value === 'all'
  const error = hits.value?.error
  return (
    <search class="panel search">
      <div class="row search-row">
        <input
          ref={field}
          class="field"
          type="search"
          aria-label="Search"
          aria-describedby="search-status"
          aria-invalid={Boolean(error)}
          placeholder={isAll ? 'Search all looms' : 'Search this loom'}
          value={text}
          spellcheck={false}
          autocomplete="off"
          onInput={(event) => {
            change({ text: event.currentTarget.value })
            if (isAll) findEverywhere(event.currentTarget.value)
          }}
          onKeyDown={(event) => {
            if (event.key === 'Enter') {
              navigateToHit(event.shiftKey ? -1 : 1)
              if (!isAll) focusTree()
            } else if (event.key === 'Escape') {
              closeSearch()
              focusTree()
            } else if (event.key === 'ArrowDown' && !isAll) navigateToHit(1)
            else if (event.key === 'ArrowUp' && !isAll) navigateToHit(-1)
            else return
            event.preventDefault()
            event.stopPropagation()
          }}
        />
        <span class="in-field">
          <IconButton
            icon={CaseSensitive}
            label="Match case"
            pressed={isCase}
            disabled={isAll}
            onClick={() => change({ isCase: !isCase })}
          />
          <IconButton
            icon={Regex}
            label="Regular expression"
            pressed={isRegex}
            disabled={isAll}
            onClick={() => change({ isRegex: !isRegex })}
          />
        </span>
        <IconButton
          icon={X}
          label="Close the search  Esc"
          onClick={() => {
            closeSearch()
            focusTree()
          }}
        />
      </div>
      {!isAll && <Filters />}
      <div class="row search-foot">
        <Choice
          label="Where to search"
          values={SCOPES}
          chosen={scope.value}
          onChoose={(to) => {
            scope.value = to
            if (to === 'all') findEverywhere(query.peek().text)
          }}
        />
        <span id="search-status" class="caption grow search-status" role="status">
          {statusText(isAll, error)}
        </span>
        {!isAll && (
          <IconButton
            icon={shape.value === 'tree' ? Rows3 : ListTree}
            label={shape.value === 'tree' ? 'Results as a list' : 'Results in the tree'}
            onClick={() => (shape.value = shape.peek() === 'tree' ? 'list' : 'tree')}
          />
        )}
      </div>
      {isAll ? <HitsEverywhere /> : shape.value === 'list' && <HitsHere loom={loom} />}
    </search>
  )
}

function statusText(isAll: boolean, error: string | undefined): string {
  if (isAll) {
    const results = everywhere.value
    if (!results) return 'Finds complete words in all texts'
    return results.data.length
      ? `${plural(results.data.length, 'result')}${results.more ? ', and more' : ''}`
      : 'No results'
  }
  if (!hits.value) return ''
  const n = hits.value.matches.length
  return error || (n ? plural(n, 'node') : 'No results')
}

function Filters() {
  const { kinds, low, high } = query.value
  const toggle = (kind: Kind) => {
    const next = new Set(kinds)
    if (!next.delete(kind)) next.add(kind)
    if (kind === 'human') next.delete('model')
    if (kind === 'model') next.delete('human')
    change({ kinds: next })
  }
  return (
    <fieldset class="filters row" aria-label="Filters">
      {KINDS.map((each) => (
        <button
          key={each}
          type="button"
          class="filter"
          aria-pressed={kinds.has(each)}
          onClick={() => toggle(each)}
        >
          {WORDS[each]}
        </button>
      ))}
      <span class="row bounds">
        <label class="caption" for="p-low">
          avg. probability
        </label>
        <Bound
          id="p-low"
          name="Average probability from, in per cent"
          value={low}
          empty="0"
          set={(value) => change({ low: value })}
        />
        <span class="caption" aria-hidden>
          –
        </span>
        <Bound
          id="p-high"
          name="Average probability to, in per cent"
          value={high}
          empty="100"
          set={(value) => change({ high: value })}
        />
        <span class="caption">%</span>
      </span>
    </fieldset>
  )
}

function Bound(props: {
  id: string
  name: string
  value: number | null
  empty: string
  set: (value: number | null) => void
}) {
  return (
    <input
      id={props.id}
      class="field bound"
      inputMode="decimal"
      aria-label={props.name}
      placeholder={props.empty}
      defaultValue={props.value === null ? '' : inPercent(props.value)}
      onInput={(event) => {
        const text = event.currentTarget.value.trim().replace(',', '.')
        const value = Number(text)
        props.set(text === '' || Number.isNaN(value) ? null : Math.max(0, Math.min(1, value / 100)))
      }}
      onKeyDown={(event) => {
        if (event.key !== 'Escape') return
        event.preventDefault()
        closeSearch()
        focusTree()
      }}
    />
  )
}
