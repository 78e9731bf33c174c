/** Buttons of the page: what they do, and the key that does it, is in their tooltips. */
import type { LucideIcon } from 'lucide-preact'
import type { ComponentChildren } from 'preact'
import { keyFor, run } from '../state/keys'

interface IconButtonProps {
  icon: LucideIcon
  label: string
  /** The id of a command in the table of keys: what a click does, unless onClick says otherwise. */
  command?: string
  onClick?: (event: MouseEvent) => void
  disabled?: boolean
  pressed?: boolean
  class?: string
}

/** A 16 px icon button; the label is its accessible name, and in the tooltip with its key. */
export function IconButton({
  icon: Icon,
  label,
  command,
  onClick,
  disabled,
  pressed,
  ...rest
}: IconButtonProps) {
  const key = command ? keyFor(command) : ''
  return (
    <button
      type="button"
      class={`icon-button ${rest.class ?? ''}`}
      aria-label={label}
      aria-pressed={pressed}
      title={key ? `${label}  ${key}` : label}
      disabled={disabled}
      onClick={onClick ?? (() => command && run(command))}
    >
      <Icon size={16} aria-hidden />
    </button>
  )
}

/** The key of a command, as a small caption. */
export function Key({ of }: { of: string }) {
  const key = keyFor(of)
  return key ? <kbd>{key}</kbd> : null
}

export function TextButton(props: {
  children: ComponentChildren
  onClick?: () => void
  kind?: 'main' | 'plain' | ''
  command?: string
  disabled?: boolean
  type?: 'button' | 'submit'
}) {
  const key = props.command ? keyFor(props.command) : ''
  return (
    <button
      type={props.type ?? 'button'}
      class={`button ${props.kind ?? ''}`}
      title={key || undefined}
      disabled={props.disabled}
      onClick={props.onClick ?? (props.command ? () => void run(props.command!) : undefined)}
    >
      {props.children}
    </button>
  )
}
