import { describe, expect, it } from 'vitest'
import { inPercent, numberedTitle, probability } from '../src/model/words'

describe('a probability', () => {
  it('is shown in per cent', () => {
    const shown = [1, 0.996, 0.41, 0.094, 0.004, 0.00096, 0.0009, 2e-7, 0].map(probability)
    const numbers = ['100', '100', '41', '9', '0.4', '0.1', '<\u202f0.1', '<\u202f0.1', '0']
    expect(shown).toEqual(numbers.map((each) => `${each}\u202f%`))
    expect(probability(null)).toBe('–')
  })

  it('keeps its digits in a field', () => {
    expect([0.07, 0.295, 1 / 3].map(inPercent)).toEqual(['7', '29.5', '33.3333'])
  })
})

describe('a numbered title', () => {
  it('has the first free number', () => {
    expect(numberedTitle('Capital', ['Capital'])).toBe('Capital (2)')
    expect(numberedTitle('Capital (2)', ['Capital', 'Capital (2)'])).toBe('Capital (3)')
  })
})
