/** The tokens of an open loom's nodes, read once. */
import { api, type Token } from '../api/client'

const SEEN = 16 // tokens whose alternatives are read at once
const TOP = 8

export class TokenCache {
  private readonly replies = new Map<string, Promise<Token[]>>()

  constructor(private readonly loom: string) {}

  /** A node's tokens, kept once asked for. top: with alternatives and ranks, as the model sees them. */
  of(number: number, top = 0): Promise<Token[]> {
    const key = `${number}/${top}`
    let found = this.replies.get(key)
    if (!found) {
      found = api.tokens(this.loom, number, top).then((told) => told.data)
      found.catch(() => this.replies.delete(key))
      this.replies.set(key, found)
    }
    return found
  }

  /** A token with its alternatives, as the model sees it, and as it was drawn; read by some at a time. */
  async at(number: number, index: number): Promise<Token | undefined> {
    const first = index - (index % SEEN)
    const key = `${number}/seen/${first}`
    let found = this.replies.get(key)
    if (!found) {
      const span = { first, last: first + SEEN, sampled: true }
      found = api.tokens(this.loom, number, TOP, span).then((told) => told.data)
      found.catch(() => this.replies.delete(key))
      this.replies.set(key, found)
    }
    return (await found).find((each) => each.index === index)
  }

  /** Forget the tokens of a node. */
  forget(number: number): void {
    for (const key of [...this.replies.keys()]) if (key.startsWith(`${number}/`)) this.replies.delete(key)
  }

  clear(): void {
    this.replies.clear()
  }
}
