import { expect, it } from 'vitest'
import { shortName } from '../src/model/words'

it('names a model without its folder, its owner and its file type', () => {
  expect(shortName('HuggingFaceTB/SmolLM2-135M-Instruct')).toBe('SmolLM2-135M-Instruct')
  expect(shortName('/models/llama/Llama-3.2-1B.Q4_K_M.gguf')).toBe('Llama-3.2-1B.Q4_K_M')
  expect(shortName('C:\\models\\phi\\')).toBe('phi')
  expect(shortName('tiny')).toBe('tiny')
})
