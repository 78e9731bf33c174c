/** System prompts of new chats, by model; remembered by the browser. */
import type { Loom } from '../api/client'
import { isObject, isString, sharedByTabs } from './storage'

export const systemPrompts = sharedByTabs<Record<string, string>>('systemPrompts', {}, (kept) =>
  Object.fromEntries(
    Object.entries(isObject(kept) ? kept : {}).filter((each): each is [string, string] => isString(each[1])),
  ),
)

export const systemFor = (model: string): string => systemPrompts.value[model] ?? ''

/** The system prompt that a chat was begun with; "" without one. */
export function systemOf(loom: Loom): string {
  const system = loom.meta?.['system']
  return isString(system) ? system : ''
}
