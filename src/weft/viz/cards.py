"""Results as notebooks show them: small tables, static, without a style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..stats import format_bytes
from . import tips
from .escape import as_html
from .facts import counted, facts
from .notebook import SOFT, text_of, token, tree
from .pieces import Piece
from .tints import percent

if TYPE_CHECKING:
    from ..loom.branches import Branches
    from ..results import Distribution, TextScore, TokenProb
    from ..search.result import SearchResult
    from ..stats import Stats

# Rows that a card shows before it counts the rest.
SCREEN = 20
_CELL = "text-align:left;padding:.15em .9em .15em 0;vertical-align:top"
_WRAP = "white-space:pre-wrap;overflow-wrap:anywhere"
_CODE = "font-family:monospace;white-space:pre"
_BAR_EM = 9


def distribution(result: Distribution) -> str:
    """Return the likeliest tokens with bars."""
    rows = (
        [str(e.rank + 1), _code(e.text), _bar(e.p), as_html(percent(e.p)), str(e.id)]
        for e in result[:SCREEN]
    )
    return _table(("rank", "token", "", "p", "id"), rows, _more(len(result)))


def token_prob(result: TokenProb) -> str:
    """Return one token and its figures."""
    said = f"p {percent(result.p)} · logprob {result.logprob:z.3f} · rank {result.rank + 1}"
    return f'{_code(result.text)} <span style="{SOFT}">{as_html(said)} · id {result.id}</span>'


def text_score(result: TextScore) -> str:
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
    rows = ([_code(piece.text), *map(as_html, tips.figures(piece)[:2])] for piece in made[:SCREEN])
    table = _table(("token", "p", "logprob"), rows, _more(len(made)))
    return f'<div style="{_WRAP}" dir="auto">{text}</div>{_soft(said)}{_folded("tokens", table)}'


def stats(result: Stats) -> str:
    """Return what an LM did and holds."""
    rows = (
        ("prefilled", f"{counted(result.prefilled, 'token')}", "run to read prompts"),
        ("reused", f"{counted(result.reused, 'token')}", "there already when work began"),
        ("decoded", f"{counted(result.decoded, 'token')}", f"{result.tokens_per_s:,.0f} a second"),
        ("recomputed", f"{counted(result.recomputed, 'token')}", "run again"),
        ("KV held", format_bytes(result.kv_bytes), counted(result.kv_tokens, "token")),
        ("unshared", format_bytes(result.kv_bytes_unshared), "a cache for every branch"),
        ("steps", counted(result.steps, "step"), f"{result.seconds:.2f} s"),
    )
    return _table((), ([name, value, _soft(note)] for name, value, note in rows))


def branches(result: Branches) -> str:
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


def search_result(result: SearchResult) -> str:
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
    return f'<span style="{_CODE}">{as_html(tips.quoted(text))}</span>'


def _bar(part: float) -> str:
    width = f"{max(part * _BAR_EM, 0.08):.2f}em"
    style = f"display:inline-block;height:.75em;width:{width};background-color:rgba(52,120,220,.6)"
    return f'<span style="{style}"></span>'


def _folded(name: str, inside: str) -> str:
    summary = f'<summary style="{SOFT};cursor:pointer">{name}</summary>'
    return f"<details>{summary}{inside}</details>"
