/** A long touch, which acts as a right click; some browsers do not report it. */
const HOLD_MS = 500
const STILL = 8 // pixels

export class LongPress {
  private timer = 0
  private from = { x: 0, y: 0 }
  /** The end of a long press is not a click. */
  private isOver = false

  down(event: PointerEvent, then: () => void): void {
    clearTimeout(this.timer)
    this.isOver = false
    if (event.pointerType !== 'touch' || !event.isPrimary) return
    this.from = { x: event.clientX, y: event.clientY }
    this.timer = window.setTimeout(() => {
      this.isOver = true
      then()
    }, HOLD_MS)
  }

  move(event: PointerEvent): void {
    if (Math.hypot(event.clientX - this.from.x, event.clientY - this.from.y) > STILL) this.end()
  }

  end(): void {
    clearTimeout(this.timer)
  }

  /** Return true if the next click is the end of a long press. */
  takesClick(): boolean {
    const takes = this.isOver
    this.isOver = false
    return takes
  }
}
