/** A text as Markdown: elements built from the parser's tokens. Markup in the text is shown as text. */
import type { Token, Tokens } from 'marked'
import { type ComponentChildren, createContext } from 'preact'
import { useContext, useMemo } from 'preact/hooks'
import { safeLink } from '../../model/markdown'
import { Copy } from './Copy'
import { Maths } from './Maths'
import { decoded, type MathToken, parse } from './parse'
import './markdown.css'

/** True in a preview, which is a part of a button: it has no links and no controls. */
const IsPreview = createContext(false)

export function MarkdownView({ text, isPreview = false }: { text: string; isPreview?: boolean }) {
  const tokens = useMemo(() => parse(text), [text])
  return (
    <IsPreview.Provider value={isPreview}>
      <div class={isPreview ? 'markdown preview' : 'markdown'}>{all(tokens)}</div>
    </IsPreview.Provider>
  )
}

const all = (tokens: readonly Token[] | undefined): ComponentChildren =>
  tokens?.map((token, at) => <Part key={at} token={token} />)

function Part({ token }: { token: Token }) {
  switch (token.type) {
    case 'space':
    case 'def':
    case 'checkbox':
      return null
    case 'code':
      return <CodeBlock token={token as Tokens.Code} />
    case 'heading':
      return <Heading token={token as Tokens.Heading} />
    case 'table':
      return <Table token={token as Tokens.Table} />
    case 'blockquote':
      return <blockquote>{all((token as Tokens.Blockquote).tokens)}</blockquote>
    case 'list':
      return <List token={token as Tokens.List} />
    case 'hr':
      return <hr />
    case 'paragraph':
      return <p dir="auto">{all((token as Tokens.Paragraph).tokens)}</p>
    case 'strong':
      return <strong>{all((token as Tokens.Strong).tokens)}</strong>
    case 'em':
      return <em>{all((token as Tokens.Em).tokens)}</em>
    case 'del':
      return <del>{all((token as Tokens.Del).tokens)}</del>
    case 'codespan':
      return <code>{(token as Tokens.Codespan).text}</code>
    case 'br':
      return <br />
    case 'link':
      return <Link token={token as Tokens.Link} />
    case 'image':
      return <Image token={token as Tokens.Image} />
    case 'math': {
      const { text, raw, isBlock } = token as unknown as MathToken
      return <Maths source={text} raw={raw} isBlock={isBlock} />
    }
    case 'escape':
      return <>{(token as Tokens.Escape).text}</>
    case 'text': {
      const { tokens, text } = token as Tokens.Text
      return <>{tokens ? all(tokens) : decoded(text)}</>
    }
    default:
      return <>{token.raw}</> // HTML, too
  }
}

function CodeBlock({ token }: { token: Tokens.Code }) {
  const isPreview = useContext(IsPreview)
  const language = token.lang?.split(/\s/)[0]
  return (
    <figure class="code-block">
      <figcaption class="row caption">
        <span class="grow">{language || 'code'}</span>
        {!isPreview && <Copy text={token.text} />}
      </figcaption>
      <pre tabIndex={isPreview ? undefined : 0}>
        <code>{token.text}</code>
      </pre>
    </figure>
  )
}

/** Headings of an answer are below those of the page. */
function Heading({ token }: { token: Tokens.Heading }) {
  const Tag = `h${Math.min(6, token.depth + 2)}` as 'h3'
  return (
    <Tag class="heading" data-depth={token.depth} dir="auto">
      {all(token.tokens)}
    </Tag>
  )
}

function List({ token }: { token: Tokens.List }) {
  const items = token.items.map((item, at) => (
    <li key={at} class={item.task ? 'is-task' : undefined} dir="auto">
      {item.task && <input type="checkbox" disabled checked={item.checked ?? false} aria-label="Task" />}
      {all(item.tokens)}
    </li>
  ))
  return token.ordered ? <ol start={token.start === '' ? 1 : token.start}>{items}</ol> : <ul>{items}</ul>
}

function Table({ token }: { token: Tokens.Table }) {
  const isPreview = useContext(IsPreview)
  const cell = (Tag: 'th' | 'td', { tokens, align }: Tokens.TableCell, at: number) => (
    <Tag key={at} data-align={align ?? undefined} dir="auto">
      {all(tokens)}
    </Tag>
  )
  return (
    <div class="table" tabIndex={isPreview ? undefined : 0} role="group" aria-label="Table">
      <table>
        <thead>
          <tr>{token.header.map((each, at) => cell('th', each, at))}</tr>
        </thead>
        <tbody>
          {token.rows.map((row, i) => (
            <tr key={i}>{row.map((each, at) => cell('td', each, at))}</tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

function Link({ token }: { token: Tokens.Link }) {
  const isPreview = useContext(IsPreview)
  const href = safeLink(token.href)
  if (href === null) return <>{token.raw}</>
  if (isPreview) return <>{all(token.tokens)}</>
  return (
    <a href={href} target="_blank" rel="noreferrer noopener nofollow" title={href}>
      {all(token.tokens)}
    </a>
  )
}

/** Images are not loaded: their hosts would learn who reads. */
function Image({ token }: { token: Tokens.Image }) {
  const isPreview = useContext(IsPreview)
  const href = safeLink(token.href)
  const name = `Image: ${token.text || token.href}`
  if (href === null) return <>{token.raw}</>
  if (isPreview) return <>{name}</>
  return (
    <a href={href} target="_blank" rel="noreferrer noopener nofollow" title={href}>
      {name}
    </a>
  )
}
