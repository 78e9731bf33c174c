/** A node's text in the path: plain, tinted by its tokens, or growing. */
import { useComputed } from '@preact/signals'
import { memo } from 'preact/compat'
import { useEffect, useMemo, useRef, useState } from 'preact/hooks'
import type { Token } from '../../api/client'
import { type HeatMode, heat, parseNumber } from '../../model/heat'
import { emptyLabel } from '../../model/label'
import { type Piece, pieceOf, piecesOf } from '../../model/pieces'
import { isRightToLeft } from '../../model/words'
import type { OpenLoom } from '../../state/loom'
import { cursor, scored, threshold } from '../../state/reading'
import { heatMode } from '../../state/view'
import { useVisible } from './useVisible'

const CHUNK = 256 // pieces that appear together: only the visible part of a long text is tinted

interface NodeTextProps {
  loom: OpenLoom
  number: number
  text: string
  isHuman: boolean
}

export const NodeText = memo(function NodeText({ loom, number, text, isHuman }: NodeTextProps) {
  const element = useRef<HTMLSpanElement>(null)
  const at = useComputed(() => (cursor.value?.node === number ? cursor.value.token : null)).value
  const lane = loom.lanes.value.get(number)
  const isGrowing = lane !== undefined && !lane.isOver
  if (isGrowing) lane.version.value
  const mode: HeatMode = isGrowing ? 'off' : heatMode.value
  const shown = isGrowing ? lane.text : text
  const isVisible = useVisible(element, mode !== 'off')
  const needsModel = mode === 'rank' || isHuman
  const isMeasured = !isHuman || scored.value.has(number)
  const tokens = useTokens(loom, number, shown, {
    wanted: !isGrowing && (at !== null || (isVisible && isMeasured)),
    top: mode !== 'off' && needsModel && isMeasured ? 1 : 0,
  })
  const pieces = useMemo(() => (tokens ? piecesOf(tokens, shown) : null), [tokens, shown])
  return (
    <span
      ref={element}
      data-node={number}
      class={isHuman ? 'written' : undefined}
      data-nothing={shown || isGrowing ? undefined : emptyLabel(loom.tree.get(number)?.ended ?? false)}
    >
      {!pieces || !tokens ? (
        shown
      ) : mode === 'off' || !isMeasured ? (
        <Pointed pieces={pieces} shown={shown} at={at} />
      ) : (
        chunked(pieces).map((chunk) => (
          <Tinted key={chunk[0]!.first} chunk={chunk} shown={shown} tokens={tokens} mode={mode} at={at} />
        ))
      )}
    </span>
  )
})

/** A node's tokens once they are needed; the previous ones stay while others load. */
function useTokens(
  loom: OpenLoom,
  number: number,
  shown: string,
  { wanted, top }: { wanted: boolean; top: number },
): Token[] | null {
  const [loaded, setLoaded] = useState<{ key: string; tokens: Token[] } | null>(null)
  const key = `${loom.sync.contextVersion.value}/${shown.length}/${top}`
  useEffect(() => {
    if (!wanted || loaded?.key === key) return
    let isOver = false
    loom.tokens.of(number, top).then(
      (tokens) => !isOver && setLoaded({ key, tokens }),
      () => {}, // the text stays plain; the card shows the error
    )
    return () => {
      isOver = true
    }
  }, [wanted, key])
  return wanted || loaded?.key === key ? (loaded?.tokens ?? null) : null
}

/** Without heat only the token that is pointed at is an element of its own. */
function Pointed({ pieces, shown, at }: { pieces: Piece[]; shown: string; at: number | null }) {
  const piece = at === null ? undefined : pieceOf(pieces, at)
  if (!piece) return <>{shown}</>
  return (
    <>
      {shown.slice(0, piece.start)}
      <span data-token={piece.first} data-cursor>
        {shown.slice(piece.start, piece.end)}
      </span>
      {shown.slice(piece.end)}
    </>
  )
}

function chunked(pieces: Piece[]): Piece[][] {
  const chunks: Piece[][] = []
  for (let i = 0; i < pieces.length; i += CHUNK) chunks.push(pieces.slice(i, i + CHUNK))
  return chunks
}

interface TintedProps {
  chunk: Piece[]
  shown: string
  tokens: Token[]
  mode: HeatMode
  at: number | null
}

function Tinted({ chunk, shown, tokens, mode, at }: TintedProps) {
  const element = useRef<HTMLSpanElement>(null)
  const isVisible = useVisible(element, true)
  const below = threshold.value
  const from = chunk[0]!.start
  const to = chunk[chunk.length - 1]!.end
  const hasCursor = at !== null && pieceOf(chunk, at) !== undefined
  if (!isVisible && !hasCursor) return <span ref={element}>{shown.slice(from, to)}</span>
  return (
    <span ref={element}>
      {chunk.map((piece) => {
        const text = shown.slice(piece.start, piece.end)
        // The blank before a word is not the word: it would stand as a strip where a line ends.
        const lead = /^\s+(?=\S)/.exec(text)?.[0] ?? ''
        const isAt = at !== null && at >= piece.first && at < piece.first + piece.count
        return (
          <span
            key={piece.first}
            data-token={piece.first}
            data-heat={levelOf(tokens, piece, mode, below) || undefined}
            data-space={/^\s+$/.test(text) ? marks(text) : undefined}
            data-back={isBack(shown, piece) || undefined}
            data-cursor={isAt || undefined}
          >
            {lead && <span class="lead">{lead}</span>}
            {text.slice(lead.length)}
          </span>
        )
      })}
    </span>
  )
}

/** The strongest tint of the tokens that make up a character. */
function levelOf(tokens: Token[], piece: Piece, mode: HeatMode, below: number | null): number {
  let level = 0
  for (const token of tokens.slice(piece.first, piece.first + piece.count)) {
    const logprob = parseNumber(token.logprob)
    if (below !== null && (logprob === null || Math.exp(logprob) >= below)) continue
    level = Math.max(
      level,
      heat(mode, { logprob, entropy: parseNumber(token.entropy), rank: token.rank ?? null }) ?? 0,
    )
  }
  return level
}

/** Return true if a piece ends a line that runs from right to left. */
function isBack(shown: string, { start, end }: Piece): boolean {
  if (!/^\s*\n/.test(shown.slice(start, end))) return false
  return isRightToLeft(shown.slice(shown.lastIndexOf('\n', start - 1) + 1, start))
}

const marks = (text: string) => text.replace(/\r?\n/g, '⏎').replace(/[^⏎]/g, '·')
