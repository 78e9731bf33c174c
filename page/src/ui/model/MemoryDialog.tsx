/** The size of the KV cache and the savings by sharing. */
import { Fragment } from 'preact'
import { useEffect, useState } from 'preact/hooks'
import { api, type Schemas } from '../../api/client'
import { percent, shareReused, timesShared } from '../../model/kv_savings'
import { ROOT } from '../../model/tree'
import { bytes, formatCount, oneLine, plural, seconds, shortName, titleOf } from '../../model/words'
import { kv, kvChanged, ownKv, readKv } from '../../state/kvUsage'
import { open } from '../../state/session'
import { failed } from '../../state/toasts'
import { TextButton } from '../Button'
import { Dialog } from '../Dialog'
import './model.css'

export function MemoryDialog() {
  kv.value
  const own = ownKv() ?? kv.value[0] ?? null
  const [looms, setLooms] = useState<readonly Schemas['LoomKv'][] | null>(null)
  const read = () => Promise.all([api.kv(true).then((reply) => setLooms(reply.looms ?? [])), readKv()])
  useEffect(() => {
    read().catch(failed)
  }, [])
  const forget = async (loom: Schemas['LoomKv']) => {
    try {
      const isOpen = open.peek()?.id === loom.loom
      await api.forgetKv(loom.loom, isOpen ? open.peek()!.current.peek() : null)
      await read()
    } catch (error) {
      failed(error)
    }
  }
  const unpin = async (loom: string, node: number) => {
    try {
      await api.nodeKv(loom, node, 'unpin')
      kvChanged()
      await read()
    } catch (error) {
      failed(error)
    }
  }
  return (
    <Dialog title="Memory" width={560} class="gauge">
      {own ? (
        <>
          <Tiers kv={own} />
          <Saved kv={own} />
          {looms && looms.length > 0 && (
            <section>
              <h3>Looms</h3>
              <dl class="bars">
                {[...looms]
                  .sort((a, b) => b.bytes - a.bytes)
                  .map((each) => (
                    <LoomBar
                      key={each.loom}
                      loom={each}
                      max={own.kv_bytes}
                      onForget={() => void forget(each)}
                    />
                  ))}
              </dl>
              <p class="caption about">
                Freed memory is recomputed when needed; all text is kept. Pinned paths and the current path of
                the open loom stay in memory.
              </p>
            </section>
          )}
          {looms && <Pinned looms={looms} max={own.kv_bytes} onUnpin={unpin} />}
        </>
      ) : (
        <p class="muted">No model is loaded, so no memory is used.</p>
      )}
    </Dialog>
  )
}

function Tiers({ kv }: { kv: Schemas['KvObject'] }) {
  return (
    <section>
      <h3>KV cache of {shortName(kv.model)}</h3>
      <dl class="bars">
        <Bar name="Device" value={kv.kv_bytes} max={kv.kv_budget_bytes} />
        {kv.offload_budget_bytes > 0 && (
          <Bar name="Host memory" value={kv.offloaded_bytes} max={kv.offload_budget_bytes} />
        )}
      </dl>
    </section>
  )
}

function Bar({ name, value, max }: { name: string; value: number; max: number | null }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{max !== null && <progress class="progress" aria-label={name} max={max} value={value} />}</dd>
      <dd class="caption" data-varies>
        {max === null ? bytes(value) : `${bytes(value)} of ${bytes(max)}`}
      </dd>
      <dd />
    </>
  )
}

function LoomBar(props: { loom: Schemas['LoomKv']; max: number; onForget: () => void }) {
  const { loom, max } = props
  const isOpen = open.value?.id === loom.loom
  return (
    <>
      <dt class="cut">{titleOf(loom)}</dt>
      <dd>
        <progress class="progress" aria-label={titleOf(loom)} max={Math.max(max, 1)} value={loom.bytes} />
      </dd>
      <dd
        class="caption"
        data-varies
        title={`${plural(loom.hot, 'node')} of ${formatCount(loom.hot + loom.cold)}`}
      >
        {bytes(loom.bytes)}
      </dd>
      <dd>
        {loom.model !== null && (
          <TextButton kind="plain" disabled={!loom.bytes} onClick={props.onForget}>
            {isOpen ? 'Free unused' : 'Free memory'}
          </TextButton>
        )}
      </dd>
    </>
  )
}

interface PinnedProps {
  looms: readonly Schemas['LoomKv'][]
  max: number
  onUnpin: (loom: string, node: number) => Promise<void>
}

function Pinned({ looms, max, onUnpin }: PinnedProps) {
  const rows = looms.flatMap((loom) => (loom.pinned ?? []).map((each) => ({ loom, ...each })))
  if (!rows.length) return null
  return (
    <section aria-label="Pinned">
      <h3>Pinned</h3>
      <dl class="bars">
        {rows.map(({ loom, node, tokens, bytes: size }) => (
          <Fragment key={`${loom.loom}/${node}`}>
            <dt class="cut">{nameOf(loom, node)}</dt>
            <dd>
              <progress
                class="progress"
                aria-label={`Path to ${nameOf(loom, node)}`}
                max={Math.max(max, 1)}
                value={size}
              />
            </dd>
            <dd class="caption" data-varies title={`${plural(tokens, 'token')} of its path`}>
              {bytes(size)}
            </dd>
            <dd>
              <button type="button" class="button plain" onClick={() => void onUnpin(loom.loom, node)}>
                Unpin
              </button>
            </dd>
          </Fragment>
        ))}
      </dl>
      <p class="caption about">
        The paths to these stay in memory until they are unpinned, their nodes are removed, or the server
        stops.
      </p>
    </section>
  )
}

/** Of the open loom its text, of others its number. */
function nameOf(loom: Schemas['LoomKv'], node: number): string {
  const mine = open.value?.id === loom.loom ? open.value.tree.get(node) : undefined
  if (mine && node !== ROOT) return `Node ${node}: ${oneLine(mine.text, 24)}`
  return `${node === ROOT ? 'The prompt' : `Node ${node}`} of ${titleOf(loom)}`
}

function Saved({ kv }: { kv: Schemas['KvObject'] }) {
  const times = timesShared(kv)
  const share = shareReused(kv)
  const rows: [string, string][] = [
    [
      'Memory without sharing',
      `${bytes(kv.kv_bytes_unshared)}${times ? `, ${times.toFixed(1)} times as much` : ''}`,
    ],
    ['Prompt tokens reused', formatCount(kv.reused)],
    ['Prompt tokens computed', formatCount(kv.prefilled)],
    ...(share === null ? [] : [['Share reused', percent(share)] as [string, string]]),
    ['Tokens generated', formatCount(kv.decoded)],
    ...(kv.recomputed ? [['Tokens recomputed', formatCount(kv.recomputed)] as [string, string]] : []),
    ...(kv.saved_s === null ? [] : [['Time saved', `≈ ${seconds(kv.saved_s)}`] as [string, string]]),
  ]
  return (
    <section>
      <h3>Saved by sharing</h3>
      <dl class="memory-facts">
        {rows.map(([name, value]) => (
          <>
            <dt class="muted">{name}</dt>
            <dd data-varies>{value}</dd>
          </>
        ))}
      </dl>
    </section>
  )
}
