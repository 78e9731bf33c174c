/** Times relative to now, such as "28 min ago". */
const DAY = 86_400_000

/** "just now", "5 min ago", "today 14:02", "yesterday", "12 May", "12 May 2024". */
export function relativeTime(iso: string, now = new Date()): string {
  const then = new Date(iso)
  if (Number.isNaN(then.getTime())) return ''
  const ago = now.getTime() - then.getTime()
  if (ago < 60_000) return 'just now'
  if (ago < 3_600_000) return `${Math.floor(ago / 60_000)} min ago`
  const days = Math.round((midnight(now) - midnight(then)) / DAY)
  if (days <= 0) return `today ${clock(then)}`
  if (days === 1) return `yesterday ${clock(then)}`
  const sameYear = then.getFullYear() === now.getFullYear()
  return then.toLocaleDateString('en-GB', {
    day: 'numeric',
    month: 'short',
    ...(sameYear ? {} : { year: 'numeric' }),
  })
}

const midnight = (date: Date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime()
const clock = (date: Date) => date.toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' })
