import { beforeEach, describe, expect, it, vi } from 'vitest'
import type { FeedHandlers } from '../src/api/feed'
import { type StandInDocument, StandInSource, standIn } from './stand_ins'

let page: StandInDocument
let told: [string, unknown][]

async function follow() {
  const { Feed } = await import('../src/api/feed')
  const handlers = new Proxy({} as FeedHandlers, {
    get: (_, name: string) => (data: unknown) => told.push([name, data]),
  })
  return new Feed('a loom/1', handlers)
}

beforeEach(() => {
  vi.useFakeTimers()
  page = standIn().document
  told = []
})

describe('a feed', () => {
  it('asks for everything that happens in its loom', async () => {
    await follow()
    expect(StandInSource.last.url).toBe('/api/v1/looms/a%20loom%2F1/events?tokens=true')
  })

  it('hands events over by their names', async () => {
    await follow()
    StandInSource.last.tell('tok', { job: 'j', t: [[0, 5, 'a', -1, 2]] }, 1)
    StandInSource.last.tell('done', { job: 'j', status: 'ok' }, 2)
    expect(told).toEqual([
      ['tok', { job: 'j', t: [[0, 5, 'a', -1, 2]] }],
      ['done', { job: 'j', status: 'ok' }],
    ])
  })

  it('says when it is cut off, and when it is back', async () => {
    const feed = await follow()
    StandInSource.last.connect()
    expect(feed.isConnected.value).toBe(true)
    StandInSource.last.breaks(false)
    vi.advanceTimersByTime(200)
    StandInSource.last.breaks(false)
    expect(feed.isConnected.value).toBe(false)
    StandInSource.last.connect()
    expect(feed.isConnected.value).toBe(true)
  })

  it('goes on at once, and says nothing, where the server only let go of it', async () => {
    const feed = await follow()
    StandInSource.last.connect()
    StandInSource.last.tell('tok', { job: 'j', t: [] }, 5)
    StandInSource.last.breaks(false)
    expect(feed.isConnected.value).toBe(true)
    vi.advanceTimersByTime(200)
    expect(StandInSource.made.length).toBe(2)
    expect(StandInSource.made[0]!.readyState).toBe(StandInSource.CLOSED)
    expect(StandInSource.last.query.get('after')).toBe('5')
  })

  it('takes an event named error for an event', async () => {
    const feed = await follow()
    StandInSource.last.connect()
    StandInSource.last.tell('error', { job: 'j', message: 'no' }, 3)
    expect(feed.isConnected.value).toBe(true)
    expect(told).toEqual([['error', { job: 'j', message: 'no' }]])
  })

  it('leaves trying again to the browser as long as that does it', async () => {
    await follow()
    StandInSource.last.breaks(false)
    vi.advanceTimersByTime(60_000)
    expect(StandInSource.made.length).toBe(1)
  })

  it('goes on after the last event when it was refused', async () => {
    await follow()
    StandInSource.last.tell('tok', { job: 'j', t: [] }, 41)
    StandInSource.last.breaks(true)
    expect(StandInSource.made.length).toBe(1)
    vi.advanceTimersByTime(2000)
    expect(StandInSource.made.length).toBe(2)
    expect(StandInSource.last.query.get('after')).toBe('41')
    StandInSource.last.breaks(true)
    vi.advanceTimersByTime(2000)
    expect(StandInSource.made.length).toBe(3)
  })

  it('gives its connection back when nobody looks, and goes on after that', async () => {
    const feed = await follow()
    StandInSource.last.tell('tok', { job: 'j', t: [] }, 7)
    page.hide(true)
    vi.advanceTimersByTime(4_000)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(StandInSource.made.length).toBe(1) // a short look elsewhere costs nothing
    page.hide(true)
    vi.advanceTimersByTime(6_000)
    expect(StandInSource.last.readyState).toBe(StandInSource.CLOSED)
    page.hide(false)
    expect(StandInSource.made.length).toBe(2)
    expect(StandInSource.last.query.get('after')).toBe('7')
    expect(feed.isConnected.value).toBe(true)
  })

  it('has one connection, whatever comes together', async () => {
    await follow()
    StandInSource.last.breaks(true) // a new one in two seconds
    page.hide(true)
    vi.advanceTimersByTime(1000)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(open()).toBe(1)
    StandInSource.last.breaks(true)
    page.hide(true)
    vi.advanceTimersByTime(30_000) // it came back meanwhile, and was given back
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(open()).toBe(1)
  })

  it('is silent once closed', async () => {
    const feed = await follow()
    StandInSource.last.breaks(true)
    feed.close()
    page.hide(true)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(StandInSource.made.length).toBe(1)
    expect(open()).toBe(0)
  })
})

const open = () => StandInSource.made.filter((each) => each.readyState !== StandInSource.CLOSED).length
