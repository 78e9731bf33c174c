import { signal } from '@preact/signals'
import type { FunctionComponent } from 'preact'
import { useEffect } from 'preact/hooks'
import { failed } from '../state/toasts'

/** Return a hook for a component whose code loads with its first use; the hook returns null until then. */
export function lazy<Props>(load: () => Promise<FunctionComponent<Props>>) {
  const component = signal<FunctionComponent<Props> | null>(null)
  let _loading: Promise<void> | null = null
  return () => {
    useEffect(() => {
      _loading ??= load().then((loaded) => {
        component.value = loaded
      }, failed)
    }, [])
    return component.value
  }
}
