/** The formats that a loom is exported to: what each is, and how much of a loom it mostly holds. */
export type Scope = 'path' | 'subtree' | 'tree'
export const SCOPES: Record<Scope, string> = { path: 'Path', subtree: 'Subtree', tree: 'Tree' }

export interface Format {
  label: string
  description: string
  scope: Scope
  /** Scopes that it cannot have. */
  unsupported?: Scope[]
}

const KNOWN: Record<string, Format> = {
  text: { label: 'Plain text', description: 'only the text', scope: 'path' },
  markdown: { label: 'Markdown', description: 'the text, or the tree as a list', scope: 'path' },
  json: { label: 'Weft JSON', description: 'the complete loom, can be imported again', scope: 'tree' },
  html: { label: 'Web page', description: 'one file for any browser', scope: 'tree' },
  messages: { label: 'Chat messages', description: 'JSON Lines, one path per line', scope: 'tree' },
  pairs: {
    label: 'Preference pairs',
    description: 'JSON Lines, pairs of siblings',
    scope: 'tree',
    unsupported: ['path'],
  },
  csv: { label: 'Table of nodes', description: 'CSV, one row per node', scope: 'tree' },
  tokens: { label: 'Table of tokens', description: 'CSV, one row per token', scope: 'tree' },
  dot: { label: 'Graphviz', description: 'a graph', scope: 'tree' },
  mermaid: { label: 'Mermaid', description: 'a graph for Markdown pages', scope: 'tree' },
}

/** The description of a format; an unknown one has only its name. */
export const formatOf = (name: string): Format =>
  KNOWN[name] ?? { label: name, description: '', scope: 'tree' }

/** Formats in the order in which people look for them. */
export function inOrder(names: readonly string[]): string[] {
  const order = Object.keys(KNOWN)
  const place = (name: string) => (order.includes(name) ? order.indexOf(name) : order.length)
  return [...names].sort((a, b) => place(a) - place(b))
}

/** The names of import formats as their users call them, in the order in which people look for them. */
const IMPORTS: Record<string, string> = {
  weft: 'Weft looms',
  text: 'plain text and Markdown',
  sillytavern: 'SillyTavern chats',
  'open-webui': 'Open WebUI exports',
  conversations: 'ChatGPT exports',
  chat: 'chat messages as JSON or JSON Lines',
  mikupad: 'mikupad sessions',
  textgen: 'text-generation-webui histories',
  loomsidian: 'Loomsidian notes and exports',
  basemode: 'basemode-loom exports',
  'python-loom': 'Python loom files',
  n8loom: 'N8Loom exports',
  nested: 'other trees of texts in JSON',
}

/** The formats that can be imported, as a sentence without its full stop. */
export function importable(names: readonly string[]): string {
  const order = Object.keys(IMPORTS)
  const known = order.filter((each) => names.includes(each))
  const others = names.filter((each) => !order.includes(each))
  const list = [...known.map((each) => IMPORTS[each]!), ...others].join(', ')
  return list.charAt(0).toUpperCase() + list.slice(1)
}

/** "SillyTavern chats" for sillytavern. */
export function importName(name: string): string {
  const label = IMPORTS[name] ?? name
  return label.charAt(0).toUpperCase() + label.slice(1)
}
