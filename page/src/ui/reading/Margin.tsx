/** The margin of the text: the role of each node, and its number among its siblings. */

import { ChevronLeft, ChevronRight } from 'lucide-preact'
import type { RefObject } from 'preact'
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks'
import { placeNotes } from '../../model/margin'
import { isHuman } from '../../model/tree'
import { type Speaker, turnsOf } from '../../model/turns'
import { shortName } from '../../model/words'
import { keyFor } from '../../state/keys'
import type { OpenLoom } from '../../state/loom'
import { showsSpecial } from '../../state/reading'

const APART = 20 // px between the tops of two notes
const INSET = 9 // px from the top of an editor to its first line

const MAX_COUNT = 99 // larger numbers have no room

interface Note {
  node: number
  /** The author of the node; null: the author of the node before. */
  who: string | null
  at: number
  of: number
}

interface MarginProps {
  loom: OpenLoom
  path: number[]
  text: RefObject<HTMLElement>
}

export function Margin({ loom, path, text }: MarginProps) {
  const notes = notesOf(loom, path)
  const tops = useTops(text, notes)
  return (
    <div class="margin">
      {notes
        .filter((note) => tops.has(note.node))
        .map((note) => (
          <div key={note.node} class="note" style={{ transform: `translateY(${tops.get(note.node)}px)` }}>
            {note.who && (
              <span class="who caption cut" title={note.who}>
                {note.who}
              </span>
            )}
            {note.of > 1 && <Switch loom={loom} note={note} />}
          </div>
        ))}
    </div>
  )
}

/** ‹ 2/5 ›: which of the siblings it is; the arrows go to the others. */
function Switch({ loom, note }: { loom: OpenLoom; note: Note }) {
  const siblings = loom.tree.siblings(note.node)
  const step = (by: number) => () => {
    const to = siblings[note.at - 1 + by]
    if (to !== undefined) loom.navigate(to)
  }
  return (
    <span class="switch" role="group" aria-label={`Branch ${note.at} of ${note.of}`}>
      <button
        type="button"
        aria-label="Previous sibling"
        title={`Previous sibling  ${keyFor('previous')}`}
        disabled={note.at === 1}
        onClick={step(-1)}
      >
        <ChevronLeft size={14} aria-hidden />
      </button>
      <span class="caption" data-of={note.of > MAX_COUNT ? note.at : `${note.at}/${note.of}`} />
      <button
        type="button"
        aria-label="Next sibling"
        title={`Next sibling  ${keyFor('next')}`}
        disabled={note.at === note.of}
        onClick={step(1)}
      >
        <ChevronRight size={14} aria-hidden />
      </button>
    </span>
  )
}

/** The author of a node of a chat: you, the author that the import names, or the model. */
function writerOf(loom: OpenLoom, who: Speaker, number: number): string {
  if (who === 'you') return 'You'
  const node = loom.tree.get(number)
  if (!node || !isHuman(node) || loom.searched.value.has(number))
    return shortName(node?.model ?? loom.info.value.model)
  const author = node.author ?? 'written'
  return author.charAt(0).toUpperCase() + author.slice(1)
}

function notesOf(loom: OpenLoom, path: number[]): Note[] {
  const { tree } = loom
  const isChat = loom.info.value.chat_template_used === true && !showsSpecial.value
  const begins = new Map<number, string>()
  if (isChat)
    for (const turn of turnsOf(tree, path, true)) {
      let last = ''
      for (const node of turn.nodes) {
        const writer = writerOf(loom, turn.who, node)
        if (writer !== last) begins.set(node, writer)
        last = writer
      }
    }
  const notes: Note[] = []
  for (const node of path) {
    const siblings = tree.siblings(node)
    const note = {
      node,
      who: begins.get(node) ?? null,
      at: siblings.indexOf(node) + 1,
      of: siblings.length,
    }
    if (note.who || note.of > 1) notes.push(note)
  }
  return notes
}

/**
 * The position of each note: at its node's first line, below the previous note. If several nodes share a
 * line, the notes of the last node and of the role have precedence.
 */
function useTops(text: RefObject<HTMLElement>, notes: Note[]): Map<number, number> {
  const [tops, setTops] = useState(new Map<number, number>())
  const latest = useRef(notes)
  latest.current = notes
  const measure = () => {
    const within = text.current
    if (!within) return
    const from = within.getBoundingClientRect().top
    const parts = new Map<number, HTMLElement>()
    for (const element of within.querySelectorAll<HTMLElement>('[data-node], [data-edits]'))
      parts.set(Number(element.dataset['node'] ?? element.dataset['edits']), element)
    const wanted = latest.current.flatMap(({ node, who, of }) => {
      const element = parts.get(node)
      const height = APART * ((who ? 1 : 0) + (of > 1 ? 1 : 0))
      return element ? [{ node, top: firstLine(element) - from, height, isFirm: who !== null }] : []
    })
    const next = placeNotes(wanted)
    setTops((now) => (isEqual(now, next) ? now : next))
  }
  useLayoutEffect(measure)
  useEffect(() => {
    const observer = new ResizeObserver(measure)
    if (text.current) observer.observe(text.current)
    return () => observer.disconnect()
  }, [])
  return tops
}

function firstLine(element: Element): number {
  if (element.matches('[data-edits]')) return element.getBoundingClientRect().top + INSET
  const textNode = document.createTreeWalker(element, NodeFilter.SHOW_TEXT).nextNode()
  if (!textNode) return element.getBoundingClientRect().top
  const range = document.createRange()
  range.setStart(textNode, 0)
  range.setEnd(textNode, Math.min(1, (textNode as Text).length))
  return range.getBoundingClientRect().top
}

function isEqual(one: Map<number, number>, other: Map<number, number>): boolean {
  return one.size === other.size && [...one].every(([key, value]) => other.get(key) === value)
}
