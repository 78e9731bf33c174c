import { beforeEach, describe, expect, it } from 'vitest'
import type { Binding } from '../src/state/keys'
import { installFakes } from './fakes'

/** Keys that browsers reserve, or whose loss would hurt users. */
const FORBIDDEN = [
  ...'wtnrlqpdhj123456789'.split('').map((key) => `Mod+${key}`),
  ...'wtnrjci'.split('').map((key) => `Mod+Shift+${key}`),
  ...['Mod+c', 'Mod+v', 'Mod+x', 'Mod+a', 'Mod+f', 'Mod+g', 'Mod+Tab', 'Mod++', 'Mod+-', 'Mod+0'],
  ...['F5', 'F6', 'F7', 'F11', 'F12', 'Alt+F4', 'Alt+d', 'Tab', 'Shift+Tab'],
]

let keys: typeof import('../src/state/keys')

const zones: ('tree' | 'text')[] = ['tree', 'text']
const of = (zone: 'tree' | 'text') =>
  keys.bindings.flatMap((each) => (each[zone] ?? []).map((key) => [key, each] as [string, Binding]))

/** The event of a key of the table, as a browser sends it on an English keyboard. */
function event(name: string, isMac = false): KeyboardEvent {
  const parts = name === '+' || name.endsWith('++') ? [...name.slice(0, -2).split('+'), '+'] : name.split('+')
  const key = parts.pop()!
  const has = (each: string) => parts.includes(each)
  const shift = has('Shift') || (key.length === 1 && key !== key.toLowerCase())
  const codes: Record<string, string> = {
    '[': 'BracketLeft',
    ']': 'BracketRight',
    ',': 'Comma',
    '.': 'Period',
  }
  const code = /^[a-z]$/i.test(key)
    ? `Key${key.toUpperCase()}`
    : /^\d$/.test(key)
      ? `Digit${key}`
      : (codes[key] ?? key)
  // Option types a symbol on macOS.
  const typed =
    isMac && has('Alt') && key.length === 1 ? 'ß' : shift && key.length === 1 ? key.toUpperCase() : key
  return {
    key: typed === 'Space' ? ' ' : typed,
    code,
    shiftKey: shift,
    altKey: has('Alt'),
    ctrlKey: has('Mod') && !isMac,
    metaKey: has('Mod') && isMac,
  } as KeyboardEvent
}

describe.each(['Linux x86_64', 'MacIntel'])('the table of keys on %s', (platform) => {
  beforeEach(async () => {
    installFakes(platform)
    keys = await import('../src/state/keys')
  })

  it.each(zones)('has no key twice in the zone %s', (zone) => {
    const names = of(zone).map(([key]) => key)
    expect(names.filter((key, at) => names.indexOf(key) !== at)).toEqual([])
  })

  it('has each command once, with words and a group', () => {
    const ids = keys.bindings.map((each) => each.id)
    expect(new Set(ids).size).toBe(ids.length)
    const labels = keys.bindings.map((each) => each.label)
    expect(new Set(labels).size).toBe(labels.length)
    for (const binding of keys.bindings) expect(binding.label).toMatch(/^[A-Z][^!]+[^.!]$/)
  })

  it.each(zones)('takes no key of the browser in the zone %s', (zone) => {
    expect(of(zone).filter(([key]) => FORBIDDEN.includes(key))).toEqual([])
  })

  it('leaves keys to a text field', () => {
    const stolen = of('text').filter(([key]) => !/^(?:Mod|Alt)\+/.test(key) && !/^F\d+$/.test(key))
    expect(stolen).toEqual([])
  })

  it.each(zones)('knows each key of the zone %s when it is pressed', (zone) => {
    const isMac = platform === 'MacIntel'
    for (const [key] of of(zone)) expect(keys.keyOf(event(key, isMac)), key).toBe(key)
  })

  it('leaves the digits to the children', () => {
    const digits = of('tree').filter(([key]) => /^[1-8]$/.test(key))
    expect(digits).toEqual([])
  })

  it('writes keys as people read them', () => {
    for (const [key] of [...of('tree'), ...of('text')]) expect(keys.shown(key), key).toMatch(/\S/)
    const isMac = platform === 'MacIntel'
    expect(keys.shown('Mod+Shift+z')).toBe(isMac ? '⌘⇧Z' : 'Ctrl+Shift+Z')
    expect(keys.shown('Alt+s', true)).toBe(isMac ? '⌃⌥S' : 'Alt+S') // Option alone types
    expect(keys.shown('G')).toBe(isMac ? '⇧G' : 'Shift+G')
    expect(keys.shown('g')).toBe('G')
    expect(keys.shown('+')).toBe('+')
  })

  it('can be evaluated before anything is open', () => {
    for (const binding of keys.bindings) expect(() => binding.can?.()).not.toThrow()
    // Presets are there for the first loom, too; nothing else with a condition can be done.
    const can = keys.bindings.filter((each) => each.can?.()).map((each) => each.id)
    expect(can.filter((each) => !each.startsWith('preset-'))).toEqual([])
  })
})
