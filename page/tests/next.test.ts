import { describe, expect, it } from 'vitest'
import { probabilityNote, samplingFields } from '../src/model/next'

const neutral = {
  temperature: 1,
  top_k: 0,
  top_p: 1,
  min_p: 0,
  typical_p: 1,
  top_n_sigma: 0,
  xtc_probability: 0,
  xtc_threshold: 0.1,
  repetition_penalty: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
  dry_multiplier: 0,
  temperature_first: false,
}

describe('the request for next tokens', () => {
  it('has no filters with neutral settings', () => {
    expect(samplingFields(neutral)).toEqual({})
    expect(samplingFields({ ...neutral, temperature_first: true, xtc_threshold: 0.3 })).toEqual({})
    expect(probabilityNote(neutral)).toContain('With neutral settings')
  })
  it('has the filters that change the distribution, in their order', () => {
    const from = { ...neutral, temperature: 1.5, xtc_probability: 0.5, temperature_first: true, top_p: 0.9 }
    expect(samplingFields(from)).toEqual({
      temperature: 1.5,
      top_p: 0.9,
      xtc_probability: 0.5,
      xtc_threshold: 0.1,
      temperature_first: true,
    })
    expect(probabilityNote({ ...from, dry_multiplier: 0.8 })).toBe(
      'p is the model’s probability; “sampled” is the probability after temperature 1.5, top-p 0.9, ' +
        'XTC probability 0.5, XTC threshold 0.1 (temperature first). Neither includes the DRY multiplier of 0.8.',
    )
  })
})
