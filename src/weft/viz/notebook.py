"""Trees and results as notebook output: static HTML that outlives the kernel.

It has no style sheet and no script, because sites that show saved notebooks strip both. Without
styles it is still nested lists that fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..lm.stats import format_bytes
from ..loom import Loom
from .color_scale import PROBABILITY
from .outline import NOTHING, Chain, counted, facts, headline, outline
from .terminal import as_html, cut
from .text import draw
from .tokens import Piece, percent, pieces, quoted, token_stats, tooltip

if TYPE_CHECKING:
    from ..lm.results import Distribution, TextScore, TokenProb
    from ..lm.stats import Stats
    from ..loom import Heddle
    from ..loom.grow import Branches
    from ..search.core import SearchResult

# Maximum number of nodes of a tree, and of characters of a node; the rest is counted.
LIMIT = 200
LONGEST = 600

_ROOT = "max-width:60em;line-height:1.6"
_LIST = "list-style:none;margin:.2em 0 0;padding:0 0 0 1.4em"
_ITEM = "margin:0 0 .6em;padding:0 0 0 .8em;border-left:2px solid rgba(128,128,128,.35)"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
SOFT = "font-size:.85em;opacity:.7"
_FOLD = f"{SOFT};cursor:pointer"


def tree(root: Heddle, *, limit: int = LIMIT, mark: Heddle | None = None) -> str:
    """Return the tree from `root` down as nested HTML lists, for a notebook.

    Args:
        root: the node from which to draw.
        limit: maximum number of nodes; the rest is counted.
        mark: the path to this node is highlighted; None: no path.
    """
    marked_ids = frozenset() if mark is None else frozenset(map(id, mark.path))
    return "".join(_tree_html(root, limit, marked_ids))


def plain(root: Heddle, *, limit: int = LIMIT) -> str:
    """Return the drawing of the tree as plain text, for notebook front ends without HTML.

    limit: maximum number of lines; the rest is counted.
    """
    return "\n".join(draw(root, limit=limit))


def text_of(node: Heddle) -> str:
    """Return a node's text as HTML, with each token colored by its probability.

    A long text is cut, and the omitted tokens are counted.
    """
    parts = pieces(node)
    if not parts:
        return f'<span style="{SOFT}">{NOTHING}</span>'
    return "".join(_tokens_html(parts))


def _tree_html(root: Heddle, limit: int, marked_ids: frozenset[int]) -> Iterator[str]:
    """Yield the nested HTML lists of the tree.

    marked_ids: `id(node)` of the nodes on the highlighted path.
    """
    yield f'<div style="{_ROOT}">'
    for entry in outline(root, limit):
        if not isinstance(entry, Chain):
            yield "</ul></details>" if entry.has_branches else ""
            yield "</li>" if not entry.is_root else ""
            continue
        is_root = entry.nodes[0] is root
        yield "" if is_root else f'<li style="{_item_style(entry, marked_ids)}">'
        for node in entry.nodes:
            yield _node_html(node)
        if entry.n_hidden:
            yield f'<div style="{SOFT}">… {counted(entry.n_hidden, "more node")} below</div>'
        if entry.n_branches:
            label = counted(entry.n_branches, "branch", "branches")
            yield f'<details open><summary style="{_FOLD}">{label}</summary><ul style="{_LIST}">'
    yield "</div>"


def _item_style(each: Chain, marked_ids: frozenset[int]) -> str:
    """Return the CSS of a chain's list item; its line is green on the highlighted path."""
    return (
        _ITEM.replace("128,128,128,.35", "20,150,135,.9")
        if id(each.nodes[-1]) in marked_ids
        else _ITEM
    )


def _node_html(node: Heddle) -> str:
    """Return a node's text (for a root, the prompt in bold) and its statistics, as HTML."""
    statistics = f'<div style="{SOFT}">{as_html(" · ".join(facts(node)))}</div>'
    if isinstance(node, Loom):
        prompt = as_html(cut(headline(node).strip("\n"), LONGEST))
        return f'<div style="{_TEXT}" dir="auto"><b>{prompt}</b></div>{statistics}'
    return f'<div style="{_TEXT}" dir="auto">{text_of(node)}</div>{statistics}'


def _tokens_html(parts: list[Piece]) -> Iterator[str]:
    """Yield the HTML of tokens up to `LONGEST` characters, then a count of the others."""
    room = LONGEST
    for at, piece in enumerate(parts):
        text, is_last = cut(piece.text, room), len(piece.text) >= room
        yield token(piece, text)
        room -= len(piece.text)
        if is_last:
            if rest := len(parts) - at - 1:
                yield f'<span style="{SOFT}"> … {counted(rest, "more token")}</span>'
            return


def token(piece: Piece, text: str) -> str:
    """Return a token as HTML, colored by its probability, with its statistics as tooltip.

    Args:
        piece: the token.
        text: the text to show for it.
    """
    if piece.p is None:
        return as_html(text)
    style = PROBABILITY.inline_css(piece.p)
    tip = as_html(tooltip(piece)).replace("\n", "&#10;")
    styled = f' style="{style}"' if style else ""
    return f'<span title="{tip}"{styled}>{as_html(text)}</span>'


# Maximum number of rows of a card; the rest is counted.
SCREEN = 20
_CELL = "text-align:left;padding:.15em .9em .15em 0;vertical-align:top"
_WRAP = "white-space:pre-wrap;overflow-wrap:anywhere"
_CODE = "font-family:monospace;white-space:pre"
_BAR_EM = 9


def distribution_card(result: Distribution) -> str:
    """Return a next-token distribution as an HTML table: tokens, probabilities and bars."""
    rows = (
        [str(e.rank + 1), _code_html(e.text), _bar_html(e.p), as_html(percent(e.p)), str(e.id)]
        for e in result[:SCREEN]
    )
    return _table(("rank", "token", "", "p", "id"), rows, _count_omitted(len(result)))


def token_prob_card(result: TokenProb) -> str:
    """Return one token and its statistics, as HTML."""
    summary = f"p {percent(result.p)} · logprob {result.logprob:z.3f} · rank {result.rank + 1}"
    return (
        f'{_code_html(result.text)} <span style="{SOFT}">{as_html(summary)} · id {result.id}</span>'
    )


def text_score_card(result: TextScore) -> str:
    """Return a scored text as HTML: colored tokens, total logprob, and a table of the tokens."""
    parts = [
        Piece(text, (token_id,), logprob)
        for text, token_id, logprob in zip(
            result.texts, result.tokens, result.logprobs, strict=True
        )
    ]
    text = "".join(token(piece, piece.text) for piece in parts)
    summary = (
        f"{counted(len(parts), 'token')} · logprob {result.total:z.3f} · mean {result.mean:z.3f}"
        f" · perplexity {result.perplexity:.3f}"
    )
    rows = (
        [_code_html(piece.text), *map(as_html, token_stats(piece)[:2])] for piece in parts[:SCREEN]
    )
    table = _table(("token", "p", "logprob"), rows, _count_omitted(len(parts)))
    return f'<div style="{_WRAP}" dir="auto">{text}</div>{_muted(summary)}{_fold("tokens", table)}'


def stats_card(result: Stats) -> str:
    """Return the statistics of an LM as an HTML table."""
    rows: tuple[tuple[str, str, str], ...] = (
        ("prefilled", f"{counted(result.prefilled, 'token')}", "run to read prompts"),
        ("reused", f"{counted(result.reused, 'token')}", "cached already when work started"),
        ("decoded", f"{counted(result.decoded, 'token')}", f"{result.tokens_per_s:,.0f} a second"),
        (
            "recomputed",
            f"{counted(result.recomputed, 'token')}",
            "run again" if result.prefix_caching else "run again: prefix caching is disabled",
        ),
        ("KV", format_bytes(result.kv_bytes), counted(result.kv_tokens, "token")),
        ("unshared", format_bytes(result.kv_bytes_unshared), "a cache for every branch"),
        ("steps", counted(result.steps, "step"), f"{result.seconds:.2f} s"),
    )
    unknown = [] if result.knows_prefill else ["prefilled", "reused", "recomputed"]
    unknown += [] if result.knows_kv else ["KV", "unshared"]
    rows = tuple(row for row in rows if row[0] not in unknown)
    return _table((), ([name, value, _muted(note)] for name, value, note in rows))


def branches_card(result: Branches) -> str:
    """Return the new branches of a call with their statistics, as HTML."""
    rows = (
        [str(number), f'<span dir="auto">{text_of(node)}</span>{_muted(" · ".join(facts(node)))}']
        for number, node in enumerate(result[:SCREEN])
    )
    table = _table((), rows, _count_omitted(len(result))) if result else _muted("no branches")
    notes = [f"failed: {error}" for error in result.failed]
    if result.skipped:
        notes.insert(0, f"{counted(len(result.skipped), 'terminal node')} left alone")
    return table + "".join(map(_muted, notes))


def search_card(result: SearchResult) -> str:
    """Return a search's result as HTML: answer, verdict, votes, and the tree with its best path."""
    verdict = {None: "", True: "✓ solved · ", False: "✗ not solved · "}[result.solved]
    card = f'<div style="{_WRAP}" dir="auto">{as_html(result.text)}</div>'
    card += _muted(f"{verdict}{result.cost}")
    if result.votes:
        max_count = max(vote.count for vote in result.votes)
        rows = (
            [
                as_html(str(vote.answer)),
                _bar_html(vote.count / max_count),
                counted(vote.count, "vote"),
            ]
            for vote in result.votes[:SCREEN]
        )
        card += _table(("answer", "", ""), rows, _count_omitted(len(result.votes)))
    return card + _fold("the tree", tree(result.loom, mark=result.best))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], more: str = "") -> str:
    """Return an HTML table.

    Args:
        head: titles of the columns, which are HTML already. Empty: the table has no header row.
        rows: cells that are HTML already.
        more: HTML after the table.
    """
    cells = "".join(f'<th style="{_CELL};{SOFT}">{name}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL};{_WRAP}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    top = f"<tr>{cells}</tr>" if head else ""
    return f'<table style="border-collapse:collapse">{top}{body}</table>{more}'


def _count_omitted(length: int) -> str:
    """Return HTML that counts the rows beyond the maximum of a table with `length` rows, or ""."""
    return _muted(f"… {length - SCREEN} more") if length > SCREEN else ""


def _muted(text: str) -> str:
    """Return a line of text as HTML in a muted color."""
    return f'<div style="{SOFT}">{as_html(text)}</div>'


def _code_html(text: str) -> str:
    """Return a token's quoted text as HTML in a monospaced font."""
    return f'<span style="{_CODE}">{as_html(quoted(text))}</span>'


def _bar_html(share: float) -> str:
    """Return a horizontal bar as HTML; its length shows a share from 0 to 1."""
    width = f"{max(share * _BAR_EM, 0.08):.2f}em"
    style = f"display:inline-block;height:.75em;width:{width};background-color:rgba(52,120,220,.6)"
    return f'<span style="{style}"></span>'


def _fold(name: str, inside: str) -> str:
    """Return HTML that the reader can unfold under the title `name`."""
    summary = f'<summary style="{SOFT};cursor:pointer">{name}</summary>'
    return f"<details>{summary}{inside}</details>"
