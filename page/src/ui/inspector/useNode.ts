/** The full object of a node, read after the user has navigated to it. */
import { useEffect, useState } from 'preact/hooks'
import { api, type Node } from '../../api/client'
import { kvVersion } from '../../state/kvUsage'
import type { OpenLoom } from '../../state/loom'
import { failed } from '../../state/toasts'

const PAUSE_MS = 80

/** null until it is known. Call the second to ask again. */
export function useNode(loom: OpenLoom, number: number): [Node | null, () => void] {
  const node = loom.tree.get(number)
  const [known, setKnown] = useState<Node | null>(null)
  const [turn, setTurn] = useState(0)
  const isGrowing = node?.growing ?? false
  const key = `${loom.id} ${number} ${node?.n_tokens} ${node?.text.length} ${node?.score} ${isGrowing} ${turn} ${kvVersion.value}`
  useEffect(() => {
    if (isGrowing) return
    let isOver = false
    const timer = setTimeout(() => {
      api.node(loom.id, number, ['params', 'meta', 'kv', 'made', 'tokens']).then(
        (reply) => !isOver && setKnown(reply),
        (error) => !isOver && failed(error),
      )
    }, PAUSE_MS)
    return () => {
      isOver = true
      clearTimeout(timer)
    }
  }, [key])
  return [known?.node === number ? known : null, () => setTurn((before) => before + 1)]
}
