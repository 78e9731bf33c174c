/** Error boundary of the page: the server keeps all looms, so a reload loses nothing. */
import { Component, type ComponentChildren } from 'preact'
import './error-boundary.css'

interface State {
  error: Error | null
}

export class ErrorBoundary extends Component<{ children: ComponentChildren }, State> {
  override state: State = { error: null }

  static override getDerivedStateFromError(error: unknown): State {
    return { error: error instanceof Error ? error : new Error(String(error)) }
  }

  override componentDidCatch(error: unknown): void {
    console.error(error)
  }

  render() {
    const { error } = this.state
    if (!error) return this.props.children
    return (
      <main class="error-boundary">
        <div role="alert">
          <h1>Something went wrong on this page; your work is saved.</h1>
          <p class="muted">The server saves your looms, and branches keep growing there.</p>
        </div>
        <button type="button" class="button main" ref={(it) => it?.focus()} onClick={() => location.reload()}>
          Reload
        </button>
        <details>
          <summary class="caption">Details</summary>
          <pre class="caption">{error.stack ?? error.message}</pre>
        </details>
      </main>
    )
  }
}
