/** An open loom: its tree, the user's position in it, its growing branches, searches and drafts. */
import { computed, effect, signal } from '@preact/signals'
import type { Loom } from '../api/client'
import { Feed } from '../api/feed'
import { sortValue } from '../model/sibling_order'
import { LoomTree } from '../model/tree'
import { Drafts } from './drafts'
import { LoomEvents } from './events'
import { Growth } from './growth'
import { Position } from './position'
import { Searches } from './searches'
import { Sync } from './sync'
import { TokenCache } from './tokens'
import { siblingOrder } from './view'

export class OpenLoom {
  readonly id: string
  readonly info
  readonly tree = new LoomTree()
  readonly drafts: Drafts
  readonly tokens: TokenCache
  readonly position: Position
  readonly growth = new Growth(this.tree)
  readonly sync: Sync
  readonly events: LoomEvents
  readonly feed: Feed
  /** Why the loom can only be read: it was removed, or the server has no loom with its id. */
  readonly gone = signal<'removed' | 'unknown' | null>(null)
  readonly bookmarks = computed(() => {
    this.tree.version.value
    return [...this.tree.preorder()].filter((each) => this.tree.get(each)?.bookmark != null)
  })
  private readonly searches = new Searches()
  readonly runs = this.searches.runs
  readonly shownRun = this.searches.shownRun
  readonly shownRound = this.searches.shownRound
  readonly run = this.searches.run
  readonly searched = this.searches.searched
  readonly pruned = this.searches.pruned
  readonly lanes = this.growth.lanes
  private readonly stopSorting: () => void

  constructor(info: Loom, wanted: number | null = null) {
    this.id = info.id
    this.info = signal(info)
    this.drafts = new Drafts(this.id)
    this.tokens = new TokenCache(this.id)
    this.position = new Position(this.id, this.tree, this.drafts, wanted)
    this.sync = new Sync(this.info, this.tree, this.position, this.drafts, this.tokens, this.searches)
    this.events = new LoomEvents(this.tree, this.position, this.growth, this.searches, this.sync)
    this.feed = new Feed(this.id, {
      ...this.events.handlers,
      renamed: ({ name, title }) => {
        this.info.value = { ...this.info.peek(), name, title }
      },
      removed: () => this.lose('removed'),
    })
    this.stopSorting = effect(() => this.tree.sortBy(sortValue(siblingOrder.value)))
  }

  close(): void {
    this.feed.close()
    this.stopSorting()
    this.drafts.end()
    this.position.close()
  }

  /** Stop following a loom that the server no longer has. Its nodes can still be read. */
  lose(how: 'removed' | 'unknown'): void {
    this.gone.value = how
    this.feed.close()
  }

  /** A chat template formats the prompt and the messages. */
  get isChat(): boolean {
    return this.info.value.chat_template_used === true
  }

  get isGrowing(): boolean {
    return this.growth.isGrowing
  }

  get current() {
    return this.position.current
  }

  get collapsed() {
    return this.position.collapsed
  }

  get hoisted() {
    return this.position.hoisted
  }

  get selected() {
    return this.position.selected
  }

  get top(): number {
    return this.position.top
  }

  navigate(number: number): void {
    this.position.navigate(number)
  }

  /** Navigate to a node of an address; another client may have added it a moment ago. */
  async visit(node: number): Promise<void> {
    await this.sync.ensure(node)
    this.navigate(node)
  }

  isUnread(number: number): boolean {
    return this.position.isUnread(number)
  }
}
