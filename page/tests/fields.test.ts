import { describe, expect, it } from 'vitest'
import { readConstraint, readListed, readNumber, readStop, writeStop } from '../src/model/fields'

const limits = { n: 128, tokens: 32768 }

describe('a typed number', () => {
  it('is taken as the server takes it', () => {
    expect(readNumber('temperature', '0,8', limits)).toEqual({ value: 0.8 })
    expect(readNumber('temperature', '0', limits)).toEqual({ value: 0 })
    expect(readNumber('top_p', '1', limits)).toEqual({ value: 1 })
    expect(readNumber('n', '128', limits)).toEqual({ value: 128 })
    expect(readNumber('seed', '9007199254740991', limits)).toEqual({ value: 9007199254740991 })
  })
  it('is rejected with the allowed values', () => {
    expect(readNumber('temperature', '-1', limits)).toBe('It must be 0 or more.')
    expect(readNumber('top_p', '0', limits)).toBe('It must be above 0, at most 1.')
    expect(readNumber('n', '500', limits)).toBe('It must be 1 to 128.')
    expect(readNumber('n', '2.5', limits)).toBe('Enter a whole number, 1 to 128.')
    expect(readNumber('top_k', 'many', limits)).toBe('Enter a number, 0 or more.')
    expect(readNumber('max_tokens', '', null)).toBe('Enter a number, 1 or more.')
    expect(readNumber('seed', '9007199254740993', limits)).toMatch(/^It must be/)
  })
})

describe('a constraint', () => {
  it('is what a request says', () => {
    expect(readConstraint({ kind: 'choices', text: 'yes\nno\n' })).toEqual({ choices: ['yes', 'no'] })
    expect(readConstraint({ kind: 'regex', text: '[a-z]+' })).toEqual({ regex: '[a-z]+' })
    expect(readConstraint({ kind: 'lark', text: 'start: "yes"' })).toEqual({ lark: 'start: "yes"' })
    expect(readConstraint({ kind: 'json_schema', text: '{"type":"object"}' })).toEqual({
      json_schema: { type: 'object' },
    })
  })
  it('says what is wrong with it', () => {
    expect(readConstraint({ kind: 'choices', text: '\n' })).toBe('Enter one choice per line.')
    expect(readConstraint({ kind: 'json_schema', text: '[1]' })).toBe('A JSON schema must be an object.')
    expect(readConstraint({ kind: 'json_schema', text: '{' })).toMatch(/^Invalid JSON: /)
  })
})

describe('values typed into a list', () => {
  it('are texts, or token ids of the vocabulary', () => {
    expect(readListed('stop', '\\n\\n', 10)).toEqual(['\n\n'])
    expect(readListed('bad_words', 'an owl', 10)).toEqual(['an owl'])
    expect(readListed('bad_words', '', 10)).toEqual([])
    expect(readListed('allowed_token_ids', ' 9, 0 3', 10)).toEqual([9, 0, 3])
    expect(readListed('stop_token_ids', '', 10)).toEqual([])
  })
  it('are rejected with the allowed values', () => {
    for (const wrong of ['-1', '10', '2.5', 'owl', '3 owl'])
      expect(readListed('stop_token_ids', wrong, 10)).toBe('Enter whole numbers, 0 to 9.')
    expect(readListed('bad_words', '\\n', 10)).toMatch('white space')
  })
})

describe('a stop text', () => {
  it('is written as it is typed', () => {
    for (const text of ['\n\n', 'a\tb', '\\n', 'plain', '\\']) expect(readStop(writeStop(text))).toBe(text)
    expect(readStop('\\n\\n')).toBe('\n\n')
  })
})
