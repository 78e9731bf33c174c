/** The tokens of an open loom's nodes, read once. */
import { api, type Token } from '../api/client'

const WINDOW = 16 // tokens whose alternatives are read at once
const TOP = 8

export class TokenCache {
  private readonly replies = new Map<string, Promise<Token[]>>()

  constructor(private readonly loom: string) {}

  /** A node's tokens, cached. top: with this many alternatives, and ranks, before sampling. */
  of(number: number, top = 0): Promise<Token[]> {
    const key = `${number}/${top}`
    let reply = this.replies.get(key)
    if (!reply) {
      reply = api.tokens(this.loom, number, top).then((list) => list.data)
      reply.catch(() => this.replies.delete(key))
      this.replies.set(key, reply)
    }
    return reply
  }

  /** A token with its alternatives, as the model sees it, and as it was drawn; read by some at a time. */
  async at(number: number, index: number): Promise<Token | undefined> {
    const first = index - (index % WINDOW)
    const key = `${number}/seen/${first}`
    let reply = this.replies.get(key)
    if (!reply) {
      const span = { first, last: first + WINDOW, sampled: true }
      reply = api.tokens(this.loom, number, TOP, span).then((list) => list.data)
      reply.catch(() => this.replies.delete(key))
      this.replies.set(key, reply)
    }
    return (await reply).find((each) => each.index === index)
  }

  /** Forget the tokens of a node. */
  forget(number: number): void {
    for (const key of [...this.replies.keys()]) if (key.startsWith(`${number}/`)) this.replies.delete(key)
  }

  clear(): void {
    this.replies.clear()
  }
}
