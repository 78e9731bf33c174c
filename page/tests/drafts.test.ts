import { beforeEach, describe, expect, it } from 'vitest'
import { installFakes } from './fakes'

let Drafts: typeof import('../src/state/drafts').Drafts
let notify: (name: string) => void

beforeEach(async () => {
  notify = installFakes().notifyOtherTabs
  Drafts = (await import('../src/state/drafts')).Drafts
})

const fresh = (node: number, base = 'as it was') => ({
  kind: 'edit' as const,
  node,
  base,
  rev: 1,
  isMessage: false,
  inPlace: false,
})

describe('a draft', () => {
  it('waits once it is left, and is nothing if it was not changed', () => {
    const drafts = new Drafts('a')
    drafts.change(drafts.begin(fresh(1)), { text: 'other' })
    drafts.begin(fresh(2))
    expect(drafts.open?.node).toBe(2)
    drafts.close()
    expect(drafts.open).toBeNull()
    expect(drafts.all.value.map((each) => [each.node, each.text])).toEqual([[1, 'other']])
    expect(new Drafts('a').all.value.map((each) => each.node)).toEqual([1])
    expect(new Drafts('b').all.value).toEqual([])
  })

  it('is open again after a reload', () => {
    const drafts = new Drafts('a')
    drafts.change(drafts.begin(fresh(1)), { text: 'half' })
    expect(new Drafts('a').open?.text).toBe('half')
  })

  it('is not lost when its node goes: it waits to be added below what that hung from', () => {
    const drafts = new Drafts('a')
    drafts.change(drafts.begin(fresh(4)), { text: 'of the one' })
    drafts.change(drafts.begin(fresh(5)), { text: 'of the other' })
    drafts.stray(4, 2)
    drafts.stray(5, 2)
    expect(drafts.all.value).toHaveLength(1)
    expect(drafts.open).toMatchObject({ kind: 'child', node: 2, isStray: true, base: '' })
    expect(drafts.open?.text).toBe('of the one\n\nof the other')
  })

  it('is kept next to drafts of another tab', () => {
    const [here, there] = [new Drafts('a'), new Drafts('a')]
    here.change(here.begin(fresh(1)), { text: 'here' })
    there.change(there.begin(fresh(2)), { text: 'there' })
    here.change(here.open!, { text: 'here, more' })
    const texts = (drafts: InstanceType<typeof Drafts>) => drafts.all.value.map((each) => each.text).sort()
    expect(texts(new Drafts('a'))).toEqual(['here, more', 'there'])
    notify('drafts.a')
    expect(texts(here)).toEqual(['here, more', 'there'])
    expect(here.open?.node).toBe(1)
    there.drop(there.open!)
    notify('drafts.a')
    expect(texts(here)).toEqual(['here, more'])
  })
})
