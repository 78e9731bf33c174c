/** The keys that are live now, by what they are for. */
import { type Binding, bindings, shown } from '../state/keys'
import { zone } from '../state/view'
import { Dialog } from './Dialog'

const GROUPS: Binding['group'][] = ['Grow', 'Navigate', 'Write', 'Structure', 'View', 'General']

export function Help() {
  const inText = zone.value === 'text'
  return (
    <Dialog
      title={inText ? 'Keyboard shortcuts while typing' : 'Keyboard shortcuts'}
      width={820}
      class="help"
    >
      <div class="help-groups">
        {GROUPS.map((group) => (
          <section key={group}>
            <h3>{group}</h3>
            <dl>
              {bindings
                .filter((each) => each.group === group && (inText ? each.text : each.tree))
                .map((each) => (
                  <div key={each.id} class="row">
                    <dt class="grow">{each.label}</dt>
                    <dd>
                      {(inText ? each.text : each.tree)!.map((key, i) => (
                        <kbd key={key}>
                          {i > 0 && ' or '}
                          {shown(key, inText)}
                        </kbd>
                      ))}
                    </dd>
                  </div>
                ))}
              {group === 'Navigate' && !inText && (
                <div class="row">
                  <dt class="grow">To the child with this number</dt>
                  <dd>
                    <kbd>1 … 9</kbd>
                  </dd>
                </div>
              )}
            </dl>
          </section>
        ))}
      </div>
    </Dialog>
  )
}
