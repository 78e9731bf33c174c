import { beforeEach, describe, expect, it, vi } from 'vitest'
import type { FeedHandlers } from '../src/api/feed'
import { type FakeDocument, FakeEventSource, installFakes } from './fakes'

let page: FakeDocument
let events: [string, unknown][]

async function follow() {
  const { Feed } = await import('../src/api/feed')
  const handlers = new Proxy({} as FeedHandlers, {
    get: (_, name: string) => (data: unknown) => events.push([name, data]),
  })
  return new Feed('a loom/1', handlers)
}

beforeEach(() => {
  vi.useFakeTimers()
  page = installFakes().document
  events = []
})

describe('a feed', () => {
  it('asks for everything that happens in its loom', async () => {
    await follow()
    expect(FakeEventSource.last.url).toBe('/api/v1/looms/a%20loom%2F1/events?tokens=true')
  })

  it('hands events over by their names', async () => {
    await follow()
    FakeEventSource.last.send('tok', { job: 'j', t: [[0, 5, 'a', -1, 2]] }, 1)
    FakeEventSource.last.send('done', { job: 'j', status: 'ok' }, 2)
    expect(events).toEqual([
      ['tok', { job: 'j', t: [[0, 5, 'a', -1, 2]] }],
      ['done', { job: 'j', status: 'ok' }],
    ])
  })

  it('says when it is cut off, and when it is back', async () => {
    const feed = await follow()
    FakeEventSource.last.connect()
    expect(feed.isConnected.value).toBe(true)
    FakeEventSource.last.breaks(false)
    vi.advanceTimersByTime(200)
    FakeEventSource.last.breaks(false)
    expect(feed.isConnected.value).toBe(false)
    FakeEventSource.last.connect()
    expect(feed.isConnected.value).toBe(true)
  })

  it('goes on at once, and says nothing, where the server only let go of it', async () => {
    const feed = await follow()
    FakeEventSource.last.connect()
    FakeEventSource.last.send('tok', { job: 'j', t: [] }, 5)
    FakeEventSource.last.breaks(false)
    expect(feed.isConnected.value).toBe(true)
    vi.advanceTimersByTime(200)
    expect(FakeEventSource.instances.length).toBe(2)
    expect(FakeEventSource.instances[0]!.readyState).toBe(FakeEventSource.CLOSED)
    expect(FakeEventSource.last.query.get('after')).toBe('5')
  })

  it('takes an event named error for an event', async () => {
    const feed = await follow()
    FakeEventSource.last.connect()
    FakeEventSource.last.send('error', { job: 'j', message: 'no' }, 3)
    expect(feed.isConnected.value).toBe(true)
    expect(events).toEqual([['error', { job: 'j', message: 'no' }]])
  })

  it('leaves trying again to the browser as long as that does it', async () => {
    await follow()
    FakeEventSource.last.breaks(false)
    vi.advanceTimersByTime(60_000)
    expect(FakeEventSource.instances.length).toBe(1)
  })

  it('resumes after the last event after a rejected request', async () => {
    await follow()
    FakeEventSource.last.send('tok', { job: 'j', t: [] }, 41)
    FakeEventSource.last.breaks(true)
    expect(FakeEventSource.instances.length).toBe(1)
    vi.advanceTimersByTime(2000)
    expect(FakeEventSource.instances.length).toBe(2)
    expect(FakeEventSource.last.query.get('after')).toBe('41')
    FakeEventSource.last.breaks(true)
    vi.advanceTimersByTime(2000)
    expect(FakeEventSource.instances.length).toBe(3)
  })

  it('closes its connection in a hidden tab and resumes afterwards', async () => {
    const feed = await follow()
    FakeEventSource.last.send('tok', { job: 'j', t: [] }, 7)
    page.hide(true)
    vi.advanceTimersByTime(4_000)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(FakeEventSource.instances.length).toBe(1) // a short look elsewhere costs nothing
    page.hide(true)
    vi.advanceTimersByTime(6_000)
    expect(FakeEventSource.last.readyState).toBe(FakeEventSource.CLOSED)
    page.hide(false)
    expect(FakeEventSource.instances.length).toBe(2)
    expect(FakeEventSource.last.query.get('after')).toBe('7')
    expect(feed.isConnected.value).toBe(true)
  })

  it('has one connection, whatever comes together', async () => {
    await follow()
    FakeEventSource.last.breaks(true) // a new one in two seconds
    page.hide(true)
    vi.advanceTimersByTime(1000)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(open()).toBe(1)
    FakeEventSource.last.breaks(true)
    page.hide(true)
    vi.advanceTimersByTime(30_000) // it came back meanwhile, and was given back
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(open()).toBe(1)
  })

  it('is silent once closed', async () => {
    const feed = await follow()
    FakeEventSource.last.breaks(true)
    feed.close()
    page.hide(true)
    page.hide(false)
    vi.advanceTimersByTime(60_000)
    expect(FakeEventSource.instances.length).toBe(1)
    expect(open()).toBe(0)
  })
})

const open = () =>
  FakeEventSource.instances.filter((each) => each.readyState !== FakeEventSource.CLOSED).length
