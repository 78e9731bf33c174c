/** What one sets and sees beside the text. */
import type { OpenLoom } from '../../state/loom'

export function Inspector({ loom }: { loom: OpenLoom }) {
  return <p class="caption">{loom.info.value.prompt}</p>
}
