/** Write the licences of the bundle's packages to a file next to the bundle, as all of them require. */
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import type { Plugin } from 'vite'

interface Manifest {
  name: string
  version: string
  license: string
  dependencies?: Record<string, string>
}

/** The packages of the page, and their dependencies. */
function shipped(root: string): Manifest[] {
  const packages = new Map<string, Manifest>()
  const todo = Object.keys(read(join(root, 'package.json')).dependencies ?? {})
  while (todo.length) {
    const name = todo.pop()!
    if (packages.has(name)) continue
    const manifest = read(join(root, 'node_modules', name, 'package.json'))
    packages.set(name, manifest)
    todo.push(...Object.keys(manifest.dependencies ?? {}))
  }
  return [...packages.values()].sort((a, b) => (a.name < b.name ? -1 : 1))
}

const read = (path: string): Manifest => JSON.parse(readFileSync(path, 'utf-8')) as Manifest

function text(root: string, { name, version, license }: Manifest): string {
  const path = join(root, 'node_modules', name, 'LICENSE')
  if (!existsSync(path)) throw new Error(`${name} has no LICENSE, which its ${license} asks us to ship`)
  const words = readFileSync(path, 'utf-8').replace(/\r\n/g, '\n').trim()
  return `${name} ${version} (${license})\n${'='.repeat(72)}\n\n${words}\n`
}

export const licences = (): Plugin => ({
  name: 'licences',
  apply: 'build',
  generateBundle() {
    const root = import.meta.dirname
    const source = shipped(root)
      .map((each) => text(root, each))
      .join('\n\n')
    this.emitFile({ type: 'asset', fileName: 'assets/licenses.txt', source })
  },
})
