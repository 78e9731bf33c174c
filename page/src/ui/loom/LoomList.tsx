/** The list of looms, newest first: filter by title or prompt, open, rename, remove. */
import { Pencil, Trash2 } from 'lucide-preact'
import { useEffect, useRef, useState } from 'preact/hooks'
import { api, type Loom } from '../../api/client'
import { relativeTime } from '../../model/relative_time'
import { oneLine, plural, titleOf } from '../../model/words'
import { removeLoom, renameLoom } from '../../state/actions'
import { linkTo, looms, open } from '../../state/session'
import { failed } from '../../state/toasts'
import { IconButton, TextButton } from '../Button'
import './looms.css'

const TYPING_MS = 150

export function LoomList({ onOpen }: { onOpen?: () => void }) {
  const [query, setQuery] = useState('')
  const [results, setResults] = useState<{ data: Loom[]; next: string | null } | null>(null)
  const list = useRef<HTMLUListElement>(null)
  const all = looms.value

  useEffect(() => {
    let isOld = false
    const timer = setTimeout(
      () =>
        api
          .looms(query.trim() || undefined)
          .then((page) => isOld || setResults({ data: page.data, next: page.next ?? null }), failed),
      query ? TYPING_MS : 0,
    )
    return () => {
      isOld = true
      clearTimeout(timer)
    }
  }, [query, all])

  const more = async () => {
    const page = await api.looms(query.trim() || undefined, results!.next!)
    setResults({ data: [...results!.data, ...page.data], next: page.next ?? null })
  }
  const rows = results?.data ?? all ?? []
  return (
    <div class="loom-list" onKeyDown={(event) => moveFocus(event, list.current!)}>
      <input
        class="field"
        type="search"
        placeholder="Find a loom"
        aria-label="Find a loom"
        value={query}
        onInput={(event) => setQuery(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== 'Enter') return
          event.preventDefault()
          list.current?.querySelector<HTMLElement>('a')?.click()
        }}
      />
      <ul ref={list} aria-label="Looms">
        {rows.map((each) => (
          <LoomRow key={each.id} loom={each} onOpen={onOpen} />
        ))}
      </ul>
      {!rows.length && results && (
        <p class="muted nothing">
          {query ? `No results for “${query.trim()}”.` : 'No looms yet. They will be listed here.'}
        </p>
      )}
      {results?.next && (
        <TextButton kind="plain" onClick={() => void more().catch(failed)}>
          Show more
        </TextButton>
      )}
    </div>
  )
}

/** Arrow keys go from the field to the rows, and from row to row. */
function moveFocus(event: KeyboardEvent, list: HTMLElement): void {
  if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return
  const links = [...list.querySelectorAll<HTMLElement>('a')]
  const at = links.findIndex((each) => each.closest('li')!.contains(document.activeElement))
  const to = at + (event.key === 'ArrowDown' ? 1 : -1)
  event.preventDefault()
  event.stopPropagation()
  if (to < 0) list.parentElement!.querySelector<HTMLElement>('input')?.focus()
  else links[Math.min(to, links.length - 1)]?.focus()
}

function LoomRow({ loom, onOpen }: { loom: Loom; onOpen: (() => void) | undefined }) {
  const [isNaming, setNaming] = useState(false)
  const isOpen = open.value?.id === loom.id
  const title = titleOf(loom)
  const prompt = oneLine(loom.prompt, 90)
  if (isNaming) return <Naming loom={loom} onEnd={() => setNaming(false)} />
  return (
    <li class="loom-row row" aria-current={isOpen ? 'page' : undefined}>
      <a class="grow" href={linkTo(loom.name)} onClick={onOpen}>
        <span class="name cut" dir="auto">
          {title}
        </span>
        {prompt !== title && (
          <span class="prompt cut" dir="auto">
            {prompt}
          </span>
        )}
      </a>
      <span class="caption loom-facts">
        {loom.growing ? `${plural(loom.growing, 'branch', 'branches')} growing · ` : ''}
        {plural(loom.n_nodes, 'node')}
        <span class="when" data-varies>
          {relativeTime(loom.changed || loom.created || '')}
        </span>
      </span>
      <span class="row tools">
        <IconButton icon={Pencil} label={`Rename ${title}`} onClick={() => setNaming(true)} />
        <IconButton icon={Trash2} label={`Remove ${title}`} onClick={() => void removeLoom(loom)} />
      </span>
    </li>
  )
}

function Naming({ loom, onEnd }: { loom: Loom; onEnd: () => void }) {
  const title = titleOf(loom)
  const save = async (typed: string) => {
    if (typed === '' || typed === title || (await renameLoom(loom, typed))) onEnd()
  }
  return (
    <li class="loom-row row">
      <input
        class="field"
        aria-label={`New name of ${title}`}
        defaultValue={title}
        maxLength={200}
        ref={(field) => {
          if (field && document.activeElement !== field) field.select()
        }}
        onKeyDown={(event) => {
          if (event.key === 'Escape') {
            event.preventDefault() // the dialog stays
            onEnd()
          } else if (event.key === 'Enter') void save(event.currentTarget.value.trim())
          else return
          event.stopPropagation()
        }}
        onBlur={(event) => void save(event.currentTarget.value.trim())}
      />
    </li>
  )
}
