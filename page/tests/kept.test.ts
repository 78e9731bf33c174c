import { beforeEach, expect, it } from 'vitest'
import { installFakes } from './fakes'

let kept: Map<string, string>
let notifyOtherTabs: (name: string) => void

beforeEach(() => {
  ;({ kept, notifyOtherTabs } = installFakes())
})

const GARBAGE = ['"x"', '5', 'null', '[null]', '{', '[1, {}]', '{"a": null}', '[{"name": 5}]', 'true']
const keep = (name: string, text: string) => kept.set(`weft.${name}`, text)

it.each(GARBAGE)('what another version kept is no reason not to begin: %s', async (garbage) => {
  const names = ['theme', 'textSize', 'textWidth', 'heat', 'panes', 'treeView', 'inspector', 'notes']
  for (const name of [...names, 'settings', 'settings.looms', 'presets', 'drafts.a']) keep(name, garbage)
  const view = await import('../src/state/view')
  const settings = await import('../src/state/settings')
  const { Drafts } = await import('../src/state/drafts')
  expect(view.theme.value).toBe('system')
  expect(view.textSize.value).toBe('normal')
  expect(view.textWidth.value).toBe('normal')
  expect(view.heatMode.value).toBe('off')
  expect(view.treeView.value).toBe('outline')
  expect(view.inspectorTab.value).toBe('generate')
  expect(view.panes.value).toEqual({ left: 288, map: 520, right: 320, hasLeft: true, hasRight: true })
  expect(view.dismissedHints.value.every((each) => typeof each === 'string')).toBe(true)
  expect(settings.settings.value).toEqual({ ...settings.NEUTRAL, temperature: 0.8 })
  expect(settings.presets.value.every((each) => typeof each.name === 'string')).toBe(true)
  expect(new Drafts('a').all.value).toEqual([])
})

it('takes of an object what is of its kind', async () => {
  keep('panes', '{"left": "wide", "right": 400, "other": 1}')
  keep('settings', '{"n": "x", "max_tokens": 9, "stop": [1], "constraint": {"kind": "?"}, "old": 1}')
  const view = await import('../src/state/view')
  const settings = await import('../src/state/settings')
  expect(view.panes.value).toMatchObject({ left: 288, right: 400 })
  expect(settings.growRequest()).toEqual({
    ...settings.growRequest(settings.NEUTRAL),
    temperature: 0.8,
    max_tokens: 9,
  })
})

it('tabs have the same settings: what one sets is not lost when another one does', async () => {
  const settings = await import('../src/state/settings')
  settings.set({ n: 7 }, 'default')
  keep('presets', JSON.stringify([...settings.presets.peek(), { name: 'of another tab', top_k: 3 }]))
  notifyOtherTabs('presets')
  settings.savePreset('of this one')
  const names = settings.presets.value.map((each) => each.name)
  expect(names.slice(-2)).toEqual(['of another tab', 'of this one'])
  expect(JSON.parse(kept.get('weft.presets')!).map((each: { name: string }) => each.name)).toEqual(names)
  keep('settings', '{"n": 9}')
  notifyOtherTabs('settings')
  expect(settings.settings.value.n).toBe(9)
})
