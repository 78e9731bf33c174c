/** How branches are grown: what the person set, for the next call, for one loom, or for all. */
import { batch, computed, signal } from '@preact/signals'
import { ApiError, type GrowRequest, type Model } from '../api/client'
import {
  type Bias,
  type Constraint,
  DRY_BREAKERS,
  KINDS,
  type Limits,
  logitBias,
  NUMBER_FIELDS,
  type NumberSetting,
  type OptionalNumber,
  readConstraint,
  SAMPLERS,
  settingLabel,
  TOKEN_IDS,
  type TokenIdsSetting,
} from '../model/fields'
import { defaultsFor } from '../model/provenance'
import { shortName } from '../model/words'
import { model, models, open, server } from './session'
import { isObject, isString, listOf, remembered, sharedByTabs } from './storage'

export type Settings = Record<Exclude<NumberSetting, OptionalNumber>, number> &
  Record<OptionalNumber, number | null> & {
    /** The ids of the models that grow; none: the loom's own. */
    models: string[]
    temperature_first: boolean
    dry_sequence_breakers: string[]
    logit_bias: Bias[]
    stop: string[]
    bad_words: string[]
    constraint: Constraint | null
  } & Record<TokenIdsSetting, number[]>

type Sampling = Pick<Settings, NumberSetting | 'temperature_first' | 'dry_sequence_breakers'>

const NEUTRAL_SAMPLING = {
  ...Object.fromEntries(SAMPLERS.map((name) => [name, NUMBER_FIELDS[name].neutral])),
  temperature_first: false,
  dry_sequence_breakers: [...DRY_BREAKERS],
} as Sampling

/** Neutral sampling: the model's own distribution. */
export const NEUTRAL: Settings = {
  ...NEUTRAL_SAMPLING,
  n: 4,
  max_tokens: 48,
  models: [],
  logit_bias: [],
  stop: [],
  bad_words: [],
  stop_token_ids: [],
  allowed_token_ids: [],
  seed: null,
  constraint: null,
}

/** More tokens than an answer has: it ends by itself, or where the context ends. */
export const TO_THE_END = 4096
export const LENGTHS = {
  Word: 2,
  Sentence: 24,
  Paragraph: 80,
  Page: 320,
  'Until it ends': TO_THE_END,
} as const

/** The target of a change: only the next call, this loom, or all looms without their own value. */
export type Scope = 'action' | 'loom' | 'default'
export const scope = signal<Scope>('loom')

const TEXT_DEFAULTS: Settings = { ...NEUTRAL, temperature: 0.8 }
const CHAT_DEFAULTS: Settings = { ...TEXT_DEFAULTS, n: 1, max_tokens: TO_THE_END }

const isBias = (value: unknown): value is Bias =>
  isObject(value) &&
  Number.isInteger(value['id']) &&
  isString(value['text']) &&
  (typeof value['bias'] === 'number' || value['bias'] === 'ban' || value['bias'] === 'only')

/** The valid part of stored settings. */
function validSettings(kept: unknown): Partial<Settings> {
  if (!isObject(kept)) return {}
  const fits = (name: string, value: unknown) => {
    if (NUMBER_FIELDS[name as NumberSetting]?.empty) return value === null || Number.isInteger(value)
    if (name === 'logit_bias') return Array.isArray(value) && value.every(isBias)
    if (name === 'constraint')
      return value === null || (isObject(value) && isString(value['text']) && String(value['kind']) in KINDS)
    if (TOKEN_IDS.includes(name as TokenIdsSetting))
      return Array.isArray(value) && value.every(Number.isInteger)
    if (['stop', 'models', 'dry_sequence_breakers', 'bad_words'].includes(name))
      return Array.isArray(value) && value.every(isString)
    if (name === 'temperature_first') return typeof value === 'boolean'
    return typeof value === 'number'
  }
  return Object.fromEntries(
    Object.entries(kept).filter(([name, value]) => Object.hasOwn(NEUTRAL, name) && fits(name, value)),
  )
}

const textSettings = sharedByTabs<Settings>('settings', TEXT_DEFAULTS, (kept) => ({
  ...TEXT_DEFAULTS,
  ...validSettings(kept),
}))
const chatSettings = sharedByTabs<Partial<Settings>>('settings.chat', {}, validSettings)
/** A new loom is a chat where its model has a template; remembered. */
export const asChat = remembered('asChat', true)
const isChat = computed(() =>
  open.value ? open.value.isChat : asChat.value && model.value?.has_chat_template === true,
)
/** The sampling parameters that the server uses for a chat with this model. */
const chatSampling = computed<Partial<Settings>>(() => {
  const sampling = Object.entries(defaultsFor(model.value, true))
  return validSettings(Object.fromEntries(sampling.filter(([name]) => name in NEUTRAL_SAMPLING)))
})
/** Chats start from the model's sampling parameters, other texts from those of the page. */
const defaults = computed<Settings>(() =>
  isChat.value ? { ...CHAT_DEFAULTS, ...chatSampling.value, ...chatSettings.value } : textSettings.value,
)

function setDefaults(changes: Partial<Settings>): void {
  if (isChat.peek()) chatSettings.value = { ...chatSettings.peek(), ...changes }
  else textSettings.value = { ...textSettings.peek(), ...changes }
}
/** The number of answers that "Grow several answers" grows: as many as branches of a text. */
export const nSeveralAnswers = computed(() => Math.max(2, textSettings.value.n))
const settingsByLoom = sharedByTabs<Record<string, Partial<Settings>>>('settings.looms', {}, (kept) =>
  Object.fromEntries(
    Object.entries(isObject(kept) ? kept : {}).map(([loom, settings]) => [loom, validSettings(settings)]),
  ),
)
const nextCallSettings = signal<Partial<Settings>>({})

// Presets

/** Named settings; what a preset does not name stays as it is. */
export type Preset = Partial<Settings> & { name: string }

const FIRST_PRESETS: Preset[] = [
  { name: 'Neutral', ...NEUTRAL_SAMPLING },
  { name: 'Steady', ...NEUTRAL_SAMPLING, temperature: 0.6, top_p: 0.95 },
  { name: 'Wild', ...NEUTRAL_SAMPLING, temperature: 1.3, min_p: 0.05 },
]
const isNamed = (each: unknown): each is Preset => isObject(each) && isString(each['name'])
export const presets = sharedByTabs<Preset[]>('presets', FIRST_PRESETS, (kept) =>
  Array.isArray(kept)
    ? listOf(isNamed)(kept).map((each) => ({ ...validSettings(each), name: each.name }))
    : FIRST_PRESETS,
)

export function applyPreset(preset: Preset): void {
  const { name: _, ...settings } = preset
  set(settings)
}

/** Keep what is set now under a name; a preset of that name is replaced. The seed is not in it, nor the models. */
export function savePreset(name: string): void {
  const { seed: _, models: __, ...kept } = settings.peek()
  const rest = presets.peek()
  const at = rest.findIndex((each) => each.name === name)
  presets.value = at < 0 ? [...rest, { name, ...kept }] : rest.with(at, { name, ...kept })
}

export const renamePreset = (old: string, name: string): void => {
  presets.value = presets
    .peek()
    .filter((each) => each.name !== name || name === old)
    .map((each) => (each.name === old ? { ...each, name } : each))
}

export const removePreset = (name: string): void => {
  presets.value = presets.peek().filter((each) => each.name !== name)
}

/** The preset that says what is set now. */
export const chosenPreset = computed<Preset | null>(
  () =>
    presets.value.find((each) =>
      Object.entries(each).every(
        ([name, value]) => name === 'name' || isSame(value, settings.value[name as keyof Settings]),
      ),
    ) ?? null,
)

export const isSame = (a: unknown, b: unknown) => JSON.stringify(a) === JSON.stringify(b)

// The settings in effect

const loomSettings = computed<Partial<Settings>>(() => settingsByLoom.value[open.value?.id ?? ''] ?? {})

/** The settings of the next call. */
export const settings = computed<Settings>(() => ({
  ...defaults.value,
  ...loomSettings.value,
  ...nextCallSettings.value,
}))

/** The settings of a scope, including the defaults below it. */
export const shownSettings = computed<Settings>(() => {
  if (scope.value === 'action') return settings.value
  return scope.value === 'loom' ? { ...defaults.value, ...loomSettings.value } : defaults.value
})

/** The settings that a scope overrides. */
export const ownSettings = computed<Partial<Settings>>(() =>
  scope.value === 'action' ? nextCallSettings.value : scope.value === 'loom' ? loomSettings.value : {},
)

export const hasOwn = computed(() => Object.keys(loomSettings.value).length > 0)

/** The server's limits; null before it has answered. */
export const limits = computed<Limits | null>(() => {
  const serverLimits = server.value?.limits
  return serverLimits
    ? { n: serverLimits['n'] ?? Infinity, tokens: serverLimits['tokens'] ?? Infinity }
    : null
})

/** Change settings: of the next call, of the open loom, or the defaults. */
export function set(changes: Partial<Settings>, where: Scope = scope.peek()): void {
  const loom = open.peek()
  batch(() => {
    const rest = new Map(fieldErrors.peek())
    for (const name of Object.keys(changes)) rest.delete(name)
    if (rest.size !== fieldErrors.peek().size) fieldErrors.value = rest
    if (where === 'action') nextCallSettings.value = { ...nextCallSettings.peek(), ...changes }
    else if (where === 'default' || !loom) setDefaults(changes)
    else
      settingsByLoom.value = {
        ...settingsByLoom.peek(),
        [loom.id]: { ...settingsByLoom.peek()[loom.id], ...changes },
      }
  })
}

/** Remove the settings of a scope. */
export function forgetOwn(where: Scope = 'loom'): void {
  const loom = open.peek()
  if (where === 'action') nextCallSettings.value = {}
  else if (where === 'default') {
    if (isChat.peek()) chatSettings.value = {}
    else textSettings.value = TEXT_DEFAULTS
  } else if (loom) {
    const { [loom.id]: _, ...rest } = settingsByLoom.peek()
    settingsByLoom.value = rest
  }
}

/** Discard the settings of the call that was just sent. */
export function discardNextCall(): void {
  if (!Object.keys(nextCallSettings.peek()).length) return
  nextCallSettings.value = {}
}

/** The loaded models that grow by these settings; none where that is the loom's own alone. */
export function growingModels(from: Settings = settings.value): Model[] {
  const chosen = models.value.filter((each) => each.state === 'ready' && from.models.includes(each.id))
  return chosen.some((each) => each.id !== model.value?.id) ? chosen : []
}

/** " with Name" or " with 2 models", for the buttons that grow; "" for the loom's own model. */
export const withModels = computed(() => {
  const chosen = growingModels()
  if (!chosen.length) return ''
  return ` with ${chosen.length === 1 ? shortName(chosen[0]!.id) : `${chosen.length} models`}`
})

/** Without it, the server would use its own breakers. */
const SENT_EMPTY = ['dry_sequence_breakers']
/** Return true if a request contains a setting: it is not empty, and not a minimum of 0. */
const isSent = (name: string, value: unknown) =>
  value !== null &&
  !(name === 'min_tokens' && value === 0) &&
  !(Array.isArray(value) && !value.length && !SENT_EMPTY.includes(name))

/** The settings as a request for growing. */
export function growRequest(from: Settings = settings.peek()): GrowRequest {
  const { constraint, logit_bias, models: _, ...sampling } = from
  const growing = growingModels(from)
  const limit = constraint ? readConstraint(constraint) : {}
  return {
    ...Object.fromEntries(Object.entries(sampling).filter(([name, value]) => isSent(name, value))),
    ...(growing.length ? { models: growing.map((each) => each.id) } : {}),
    ...(logit_bias.length ? { logit_bias: logitBias(logit_bias) } : {}),
    ...(typeof limit === 'string' ? {} : limit),
  }
}

// Invalid settings

/** By field: the error of the typed value, from the page or the server. */
export const fieldErrors = signal<ReadonlyMap<string, string>>(new Map())

export function setFieldError(field: string, message: string | null): void {
  const now = new Map(fieldErrors.peek())
  if (message === null ? !now.delete(field) : now.get(field) === message) return
  if (message !== null) now.set(field, message)
  fieldErrors.value = now
}

/** Show a server error at its field. Returns true if that field is set here. */
export function showFieldError(error: unknown): boolean {
  if (!(error instanceof ApiError)) return false
  const isForm = error.code === 'invalid_constraint' || error.code === 'constraint_failed'
  const param = isForm ? 'constraint' : (error.param?.split('.').pop() ?? '')
  const field = param in KINDS || param === 'constraint' ? 'constraint' : param
  if (!(field in NEUTRAL)) return false
  setFieldError(field, error.message)
  return true
}

/** The error of the first invalid field, which prevents a call; null: all are valid. */
export const blocked = computed<string | null>(() => {
  for (const [field, message] of fieldErrors.value) return `${settingLabel(field)}: ${message}`
  const ofTokens = (['logit_bias', ...TOKEN_IDS] as const).find((name) => settings.value[name].length)
  if (ofTokens && growingModels().some((each) => each.id !== model.value?.id))
    return `${settingLabel(ofTokens)}: they refer to tokens of this loom’s model. Remove them to grow with another one.`
  return null
})
