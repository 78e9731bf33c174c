/** The models on the server's shelf: what each can do, loading and unloading. */
import { useState } from 'preact/hooks'
import type { Model } from '../../api/client'
import { loading } from '../../model/progress'
import { bytes, formatCount, plural, shortName } from '../../model/words'
import { confirm } from '../../state/actions'
import { loadModel, unloadModel } from '../../state/loading'
import { models, open } from '../../state/session'
import { sentence } from '../../state/toasts'
import { TextButton } from '../Button'
import { Dialog } from '../Dialog'
import { Progress } from './ModelState'
import './model.css'

export function Models() {
  const all = models.value
  const wanted = open.value?.info.value.model
  const isThere = all.some((each) => each.id === wanted || each.source === wanted)
  return (
    <Dialog title="Models" width={600}>
      <div>
        {all.length ? (
          <ul class="models" aria-label="Models">
            {all.map((each) => (
              <ModelRow key={each.id} model={each} />
            ))}
          </ul>
        ) : (
          <p class="muted">No model is loaded.</p>
        )}
        <LoadForm suggestion={isThere ? '' : (wanted ?? '')} />
      </div>
    </Dialog>
  )
}

const ABILITIES: Record<string, string> = {
  steps: 'branches at any token',
  scoring: 'scores texts',
  shared_attention: 'reads shared text once for all branches',
  lora: 'LoRA',
  embed: 'embeddings',
  offload: 'KV cache in host memory',
}

/** The abilities of a model in a few words, without technical ones. */
function canDo(model: Model): string[] {
  const abilities = model.abilities ?? {}
  const words = Object.entries(ABILITIES).flatMap(([name, label]) =>
    abilities[name] === true ? [label] : [],
  )
  return [...new Set(words)]
}

function ModelRow({ model }: { model: Model }) {
  const facts = [
    model.engine,
    model.device,
    model.dtype,
    model.n_ctx && `context ${formatCount(model.n_ctx)}`,
    model.n_vocab && `vocabulary ${formatCount(model.n_vocab)}`,
    model.bytes && `up to ${bytes(model.bytes)} with KV cache`,
    model.has_chat_template && 'chat',
  ].filter(Boolean)
  const progress = loading(model.progress)
  const unload = async () => {
    const users = model.users ?? 0
    const isSure =
      !users ||
      (await confirm(
        `Unload ${shortName(model.id)}?`,
        `${plural(users, 'job')} use it now and would fail.`,
        'Unload',
      ))
    if (isSure) await unloadModel(model.id, users > 0)
  }
  return (
    <li>
      <div class="row">
        <strong class="cut" title={model.id}>
          {shortName(model.id)}
        </strong>
        {model.is_default && <span class="caption">default</span>}
        <span class="grow" />
        {model.state === 'loading' && (
          <Progress share={progress.share} label={`Loading ${shortName(model.id)}`} />
        )}
        <TextButton onClick={() => void unload()}>
          {model.state === 'loading' ? 'Cancel' : model.state === 'failed' ? 'Remove' : 'Unload'}
        </TextButton>
      </div>
      {model.state === 'loading' && (
        <p class="caption" data-varies>
          {progress.words}
        </p>
      )}
      {model.state === 'failed' && (
        <>
          <p class="error">{sentence(model.error?.message ?? '')}</p>
          {model.error?.hint && <p class="muted">{sentence(model.error.hint)}</p>}
        </>
      )}
      {model.state === 'ready' && (
        <p class="caption facts">
          {facts.join(' · ')}
          {canDo(model).length > 0 && <br />}
          {canDo(model).join(' · ')}
        </p>
      )}
      {model.source !== model.id && <p class="caption cut">{model.source}</p>}
    </li>
  )
}

function LoadForm({ suggestion }: { suggestion: string }) {
  const [source, setSource] = useState(suggestion)
  const [isBusy, setBusy] = useState(false)
  return (
    <form
      class="model-load column"
      onSubmit={async (event) => {
        event.preventDefault()
        setBusy(true)
        if (await loadModel({ source: source.trim() })) setSource('')
        setBusy(false)
      }}
    >
      <label for="model-source">Load another model</label>
      <div class="row">
        <input
          id="model-source"
          autofocus
          class="field"
          spellcheck={false}
          placeholder="tiny, a folder, a .gguf file, or org/name on the Hub"
          value={source}
          onInput={(event) => setSource(event.currentTarget.value)}
        />
        <TextButton type="submit" disabled={isBusy || !source.trim()}>
          Load
        </TextButton>
      </div>
      <p class="caption">Folders need a server started with --model-root, the Hub one with --allow-hub.</p>
    </form>
  )
}
