"""Trees and results in a notebook's output: static HTML that outlives the kernel.

No style sheet and no script: sites that show saved notebooks strip both. What is left without
styles is still nested lists that fold.
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
from .tokens import Piece, figures, percent, pieces, quoted, tip_of

if TYPE_CHECKING:
    from ..lm.results import Distribution, TextScore, TokenProb
    from ..lm.stats import Stats
    from ..loom import Heddle
    from ..loom.grow import Branches
    from ..search.core import SearchResult

# Nodes of a tree, and characters of a node, that an output shows before it counts the rest.
LIMIT = 200
LONGEST = 600

_ROOT = "max-width:60em;line-height:1.6"
_LIST = "list-style:none;margin:.2em 0 0;padding:0 0 0 1.4em"
_ITEM = "margin:0 0 .6em;padding:0 0 0 .8em;border-left:2px solid rgba(128,128,128,.35)"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
SOFT = "font-size:.85em;opacity:.7"
_FOLD = f"{SOFT};cursor:pointer"


def tree(root: Heddle, *, limit: int = LIMIT, mark: Heddle | None = None) -> str:
    """Return the tree from `root` down for a notebook; folded open, the rest counted."""
    marked = frozenset() if mark is None else frozenset(map(id, mark.path))
    return "".join(_tree(root, limit, marked))


def plain(root: Heddle, *, limit: int = LIMIT) -> str:
    """Return the drawing for where there is no HTML."""
    return "\n".join(draw(root, limit=limit))


def text_of(node: Heddle) -> str:
    """Return a node's text, its tokens tinted; what is too long is counted."""
    found = pieces(node)
    if not found:
        return f'<span style="{SOFT}">{NOTHING}</span>'
    return "".join(_tokens(found))


def _tree(root: Heddle, limit: int, marked: frozenset[int]) -> Iterator[str]:
    yield f'<div style="{_ROOT}">'
    for each in outline(root, limit):
        if not isinstance(each, Chain):
            yield "</ul></details>" if each.has_branches else ""
            yield "</li>" if not each.is_root else ""
            continue
        is_root = each.nodes[0] is root
        yield "" if is_root else f'<li style="{_item(each, marked)}">'
        for node in each.nodes:
            yield _node(node)
        if each.n_hidden:
            yield f'<div style="{SOFT}">… {counted(each.n_hidden, "more node")} below</div>'
        if each.n_branches:
            said = counted(each.n_branches, "branch", "branches")
            yield f'<details open><summary style="{_FOLD}">{said}</summary><ul style="{_LIST}">'
    yield "</div>"


def _item(each: Chain, marked: frozenset[int]) -> str:
    return (
        _ITEM.replace("128,128,128,.35", "20,150,135,.9") if id(each.nodes[-1]) in marked else _ITEM
    )


def _node(node: Heddle) -> str:
    figures = f'<div style="{SOFT}">{as_html(" · ".join(facts(node)))}</div>'
    if isinstance(node, Loom):
        asked = as_html(cut(headline(node).strip("\n"), LONGEST))
        return f'<div style="{_TEXT}" dir="auto"><b>{asked}</b></div>{figures}'
    return f'<div style="{_TEXT}" dir="auto">{text_of(node)}</div>{figures}'


def _tokens(found: list[Piece]) -> Iterator[str]:
    room = LONGEST
    for at, piece in enumerate(found):
        text, is_last = cut(piece.text, room), len(piece.text) >= room
        yield token(piece, text)
        room -= len(piece.text)
        if is_last:
            if rest := len(found) - at - 1:
                yield f'<span style="{SOFT}"> … {counted(rest, "more token")}</span>'
            return


def token(piece: Piece, text: str) -> str:
    """Return a token's text, tinted by its probability, with its figures under the pointer."""
    if piece.p is None:
        return as_html(text)
    style = PROBABILITY.inline(piece.p)
    tip = as_html(tip_of(piece)).replace("\n", "&#10;")
    styled = f' style="{style}"' if style else ""
    return f'<span title="{tip}"{styled}>{as_html(text)}</span>'


# Rows that a card shows before it counts the rest.
SCREEN = 20
_CELL = "text-align:left;padding:.15em .9em .15em 0;vertical-align:top"
_WRAP = "white-space:pre-wrap;overflow-wrap:anywhere"
_CODE = "font-family:monospace;white-space:pre"
_BAR_EM = 9


def distribution_card(result: Distribution) -> str:
    """Return the likeliest tokens with bars."""
    rows = (
        [str(e.rank + 1), _code(e.text), _bar(e.p), as_html(percent(e.p)), str(e.id)]
        for e in result[:SCREEN]
    )
    return _table(("rank", "token", "", "p", "id"), rows, _more(len(result)))


def token_prob_card(result: TokenProb) -> str:
    """Return one token and its figures."""
    said = f"p {percent(result.p)} · logprob {result.logprob:z.3f} · rank {result.rank + 1}"
    return f'{_code(result.text)} <span style="{SOFT}">{as_html(said)} · id {result.id}</span>'


def text_score_card(result: TextScore) -> str:
    """Return the text tinted, its sums, and a table of its tokens."""
    made = [
        Piece(text, (token_id,), logprob)
        for text, token_id, logprob in zip(
            result.texts, result.tokens, result.logprobs, strict=True
        )
    ]
    text = "".join(token(piece, piece.text) for piece in made)
    said = (
        f"{counted(len(made), 'token')} · logprob {result.total:z.3f} · mean {result.mean:z.3f}"
        f" · perplexity {result.perplexity:.3f}"
    )
    rows = ([_code(piece.text), *map(as_html, figures(piece)[:2])] for piece in made[:SCREEN])
    table = _table(("token", "p", "logprob"), rows, _more(len(made)))
    return f'<div style="{_WRAP}" dir="auto">{text}</div>{_soft(said)}{_folded("tokens", table)}'


def stats_card(result: Stats) -> str:
    """Return what an LM did and holds."""
    rows: tuple[tuple[str, str, str], ...] = (
        ("prefilled", f"{counted(result.prefilled, 'token')}", "run to read prompts"),
        ("reused", f"{counted(result.reused, 'token')}", "there already when work began"),
        ("decoded", f"{counted(result.decoded, 'token')}", f"{result.tokens_per_s:,.0f} a second"),
        (
            "recomputed",
            f"{counted(result.recomputed, 'token')}",
            "run again" if result.prefix_caching else "run again: prefix caching is disabled",
        ),
        ("KV held", format_bytes(result.kv_bytes), counted(result.kv_tokens, "token")),
        ("unshared", format_bytes(result.kv_bytes_unshared), "a cache for every branch"),
        ("steps", counted(result.steps, "step"), f"{result.seconds:.2f} s"),
    )
    unknown = [] if result.knows_prefill else ["prefilled", "reused", "recomputed"]
    unknown += [] if result.knows_kv else ["KV held", "unshared"]
    rows = tuple(row for row in rows if row[0] not in unknown)
    return _table((), ([name, value, _soft(note)] for name, value, note in rows))


def branches_card(result: Branches) -> str:
    """Return the branches of a call with their figures."""
    rows = (
        [str(number), f'<span dir="auto">{text_of(node)}</span>{_soft(" · ".join(facts(node)))}']
        for number, node in enumerate(result[:SCREEN])
    )
    table = _table((), rows, _more(len(result))) if result else _soft("no branches")
    notes = [f"failed: {error}" for error in result.failed]
    if result.skipped:
        notes.insert(0, f"{counted(len(result.skipped), 'terminal node')} left alone")
    return table + "".join(map(_soft, notes))


def search_card(result: SearchResult) -> str:
    """Return the answer, the verdict, the votes, and the tree with the path to the best node."""
    verdict = {None: "", True: "✓ solved · ", False: "✗ not solved · "}[result.solved]
    made = f'<div style="{_WRAP}" dir="auto">{as_html(result.text)}</div>'
    made += _soft(f"{verdict}{result.cost}")
    if result.votes:
        most = max(vote.count for vote in result.votes)
        rows = (
            [as_html(str(vote.answer)), _bar(vote.count / most), counted(vote.count, "vote")]
            for vote in result.votes[:SCREEN]
        )
        made += _table(("answer", "", ""), rows, _more(len(result.votes)))
    return made + _folded("the tree", tree(result.loom, mark=result.best))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], more: str = "") -> str:
    """Return a table of cells that are HTML already."""
    cells = "".join(f'<th style="{_CELL};{SOFT}">{name}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL};{_WRAP}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    top = f"<tr>{cells}</tr>" if head else ""
    return f'<table style="border-collapse:collapse">{top}{body}</table>{more}'


def _more(length: int) -> str:
    return _soft(f"… {length - SCREEN} more") if length > SCREEN else ""


def _soft(text: str) -> str:
    return f'<div style="{SOFT}">{as_html(text)}</div>'


def _code(text: str) -> str:
    return f'<span style="{_CODE}">{as_html(quoted(text))}</span>'


def _bar(part: float) -> str:
    width = f"{max(part * _BAR_EM, 0.08):.2f}em"
    style = f"display:inline-block;height:.75em;width:{width};background-color:rgba(52,120,220,.6)"
    return f'<span style="{style}"></span>'


def _folded(name: str, inside: str) -> str:
    summary = f'<summary style="{SOFT};cursor:pointer">{name}</summary>'
    return f"<details>{summary}{inside}</details>"
