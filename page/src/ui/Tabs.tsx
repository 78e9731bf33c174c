/** Tabs and their panel. The Tab key reaches the chosen tab, arrow keys choose another one. */
import type { HTMLAttributes } from 'preact'
import './tabs.css'

export interface Tab<Value extends string> {
  value: Value
  label: string
  /** The id of the element that the tab shows. */
  panel: string
  title?: string | undefined
}

interface TabsProps<Value extends string> {
  label: string
  tabs: readonly Tab<Value>[]
  chosen: Value
  onChoose: (value: Value) => void
  class?: string
}

const tabId = (value: string) => `tab-${value}`

export function Tabs<Value extends string>({ label, tabs, chosen, onChoose, ...rest }: TabsProps<Value>) {
  const onKey = (event: KeyboardEvent & { currentTarget: HTMLElement }) => {
    const at = tabs.findIndex((tab) => tab.value === chosen)
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key]
    if (to === undefined) return
    event.preventDefault()
    event.stopPropagation()
    const tab = tabs.at(to % tabs.length)!
    onChoose(tab.value)
    document.getElementById(tabId(tab.value))?.focus()
  }
  return (
    <div class={`tabs ${rest.class ?? ''}`} role="tablist" aria-label={label} onKeyDown={onKey}>
      {tabs.map(({ value, label, panel, title }) => (
        <button
          key={value}
          type="button"
          role="tab"
          id={tabId(value)}
          aria-selected={value === chosen}
          aria-controls={panel}
          tabIndex={value === chosen ? 0 : -1}
          title={title}
          onClick={() => onChoose(value)}
        >
          {label}
        </button>
      ))}
    </div>
  )
}

interface TabPanelProps extends HTMLAttributes<HTMLDivElement> {
  /** The chosen tab, which names the panel. */
  tab: string
}

export const TabPanel = ({ tab, ...rest }: TabPanelProps) => (
  <div role="tabpanel" aria-labelledby={tabId(tab)} {...rest} />
)
