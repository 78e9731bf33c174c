/** What a browser has and the tests' runtime lacks, as far as state/ and api/ ask for it. */
import { vi } from 'vitest'

/** An EventSource that a test speaks through. */
export class StandInSource extends EventTarget {
  static readonly CONNECTING = 0
  static readonly OPEN = 1
  static readonly CLOSED = 2
  static made: StandInSource[] = []
  static get last(): StandInSource {
    return StandInSource.made[StandInSource.made.length - 1]!
  }
  readyState = StandInSource.CONNECTING
  onopen: (() => void) | null = null

  constructor(readonly url: string) {
    super()
    StandInSource.made.push(this)
  }

  get query(): URLSearchParams {
    return new URL(this.url, 'http://server').searchParams
  }
  connect(): void {
    this.readyState = StandInSource.OPEN
    this.onopen?.()
  }
  tell(name: string, data: unknown, id: number | string = ''): void {
    this.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data), lastEventId: String(id) }))
  }
  /** Break: the browser tries again by itself, or was refused and will not. */
  breaks(isRefused: boolean): void {
    this.readyState = isRefused ? StandInSource.CLOSED : StandInSource.CONNECTING
    this.dispatchEvent(new Event('error'))
  }
  close(): void {
    this.readyState = StandInSource.CLOSED
  }
}

export class StandInDocument extends EventTarget {
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
export function standIn(platform = 'Linux x86_64') {
  vi.resetModules()
  StandInSource.made = []
  const kept = new Map<string, string>()
  const document = new StandInDocument()
  const tabs = new EventTarget()
  vi.stubGlobal('addEventListener', tabs.addEventListener.bind(tabs))
  vi.stubGlobal('removeEventListener', tabs.removeEventListener.bind(tabs))
  vi.stubGlobal('sessionStorage', storage(new Map()))
  vi.stubGlobal('navigator', { platform })
  vi.stubGlobal('localStorage', storage(kept))
  vi.stubGlobal('document', document)
  vi.stubGlobal('EventSource', StandInSource)
  vi.stubGlobal('location', { hash: '' })
  vi.stubGlobal('window', globalThis)
  /** What the other tabs of a browser hear when one keeps something. */
  const tellOtherTabs = (name: string) =>
    tabs.dispatchEvent(Object.assign(new Event('storage'), { key: `weft.${name}` }))
  return { kept, document, tellOtherTabs }
}
