import preact from '@preact/preset-vite'
import { defineConfig } from 'vite'
import { licences } from './licences'

export default defineConfig({
  plugins: [preact(), licences()],
  base: '/',
  build: {
    outDir: '../src/weft/service/server/static',
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: false,
    assetsInlineLimit: 0, // everything is a file of the server: its policy allows nothing else
    reportCompressedSize: true,
    sourcemap: false,
  },
  server: { proxy: { '/api': 'http://127.0.0.1:8000' } },
  test: { include: ['tests/**/*.test.ts'], environment: 'node', css: true },
} as never)
