/** Fakes of browser APIs that the tests' runtime lacks and state/ and api/ use. */
import { vi } from 'vitest'

/** An EventSource that a test speaks through. */
export class FakeEventSource extends EventTarget {
  static readonly CONNECTING = 0
  static readonly OPEN = 1
  static readonly CLOSED = 2
  static instances: FakeEventSource[] = []
  static get last(): FakeEventSource {
    return FakeEventSource.instances[FakeEventSource.instances.length - 1]!
  }
  readyState = FakeEventSource.CONNECTING
  onopen: (() => void) | null = null

  constructor(readonly url: string) {
    super()
    FakeEventSource.instances.push(this)
  }

  get query(): URLSearchParams {
    return new URL(this.url, 'http://server').searchParams
  }
  connect(): void {
    this.readyState = FakeEventSource.OPEN
    this.onopen?.()
  }
  send(name: string, data: unknown, id: number | string = ''): void {
    this.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data), lastEventId: String(id) }))
  }
  /** Break the connection. The browser reconnects, unless the server rejected the request. */
  breaks(isRefused: boolean): void {
    this.readyState = isRefused ? FakeEventSource.CLOSED : FakeEventSource.CONNECTING
    this.dispatchEvent(new Event('error'))
  }
  close(): void {
    this.readyState = FakeEventSource.CLOSED
  }
}

export class FakeDocument extends EventTarget {
  hidden = false
  activeElement = null
  hide(isHidden: boolean): void {
    this.hidden = isHidden
    this.dispatchEvent(new Event('visibilitychange'))
  }
}

const storage = (kept: Map<string, string>) => ({
  getItem: (name: string) => kept.get(name) ?? null,
  setItem: (name: string, value: string) => void kept.set(name, value),
})

/** Put the stand-ins where modules look for them, before those are imported. */
export function installFakes(platform = 'Linux x86_64') {
  vi.resetModules()
  FakeEventSource.instances = []
  const kept = new Map<string, string>()
  const document = new FakeDocument()
  const tabs = new EventTarget()
  vi.stubGlobal('addEventListener', tabs.addEventListener.bind(tabs))
  vi.stubGlobal('removeEventListener', tabs.removeEventListener.bind(tabs))
  vi.stubGlobal('sessionStorage', storage(new Map()))
  vi.stubGlobal('navigator', { platform })
  vi.stubGlobal('localStorage', storage(kept))
  vi.stubGlobal('document', document)
  vi.stubGlobal('EventSource', FakeEventSource)
  vi.stubGlobal('location', { hash: '' })
  vi.stubGlobal('window', globalThis)
  /** The event that other tabs receive after a write to the storage. */
  const notifyOtherTabs = (name: string) =>
    tabs.dispatchEvent(Object.assign(new Event('storage'), { key: `weft.${name}` }))
  return { kept, document, notifyOtherTabs }
}
