"""A node in the page: its number, its text token by token, its figures and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import tips
from .escape import as_html
from .facts import NOTHING, counted, facts
from .pieces import Piece, Seen, pieces
from .tints import ENTROPY, PROBABILITY, percent

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

# Less likely alternatives are under the pointer only.
_LISTED = 0.001
# What percentages round to; a row that says so says nothing.
_CERTAIN = percent(1.0)


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of nodes.

    numbers: by node id. node: what to write instead of the text. seen: by node id, what the model
    says of each token. marked: ids of the nodes on the path to show. is_terse: no tables, and
    figures under the pointer for tinted tokens only.
    """

    numbers: Mapping[str, int]
    node: Label | None = None
    seen: Mapping[str, Sequence[Seen]] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()
    is_terse: bool = False


def by_number(node: Heddle, numbers: Mapping[str, int]) -> list[Heddle]:
    """Return a node's children in the order of their numbers; those without one are the last."""
    last = len(numbers)
    return sorted(node.children, key=lambda child: numbers.get(child.id, last))


def node_html(node: Heddle, told: Told) -> str:
    """Return one node's element."""
    on = " on" if node.id in told.marked else ""
    number = told.numbers.get(node.id)
    mark = "" if number is None else f'<span class="no" id="{number}">{number}</span>'
    inside = "".join(_text(node, told) if told.node is None else _labelled(told.node(node)))
    return f'<div class="node{on}" id="n-{as_html(node.id)}">{mark}{inside}</div>\n'


def _labelled(text: str) -> Iterator[str]:
    yield f'<div class="text" dir="auto">{as_html(text)}</div>'


def _text(node: Heddle, told: Told) -> Iterator[str]:
    found = pieces(node, told.seen.get(node.id, ()))
    text = "".join(_token(piece, is_terse=told.is_terse) for piece in found)
    yield f'<div class="text" dir="auto">{text or _NOTHING}</div>'
    figures = as_html(" · ".join(facts(node)))
    rows = [] if told.is_terse else [piece for piece in found if _says_something(piece)]
    if not rows:
        yield f'<p class="soft">{figures}</p>'
        return
    yield f'<details class="figures"><summary>{figures}</summary><div class="scroll" tabindex="0">'
    yield _table(rows)
    certain = sum(piece.logprob is not None for piece in found) - len(rows)
    if certain:
        yield f'<p class="soft">{counted(certain, "more token")} of {_CERTAIN}</p>'
    yield "</div></details>"


_NOTHING = f'<span class="nothing">{NOTHING}</span>'


def _says_something(piece: Piece) -> bool:
    return piece.p is not None and not piece.is_mean and percent(piece.p) != _CERTAIN


def _token(piece: Piece, *, is_terse: bool) -> str:
    text = as_html(piece.text)
    if piece.logprob is None:
        return text
    step = PROBABILITY.level(piece.p or 0.0)
    levels, surprise = f"p{step}", step
    if piece.entropy is not None:
        step = ENTROPY.level(piece.entropy)
        levels, surprise = f"{levels} h{step}", surprise + step
    if is_terse and not surprise:
        return text
    line_end = " nl" if piece.text.startswith("\n") else ""
    tip = as_html(tips.tip(piece)).replace("\n", "&#10;")
    return f'<span class="t {levels}{line_end}" data-tip="{tip}">{text}</span>'


def _table(rows: Sequence[Piece]) -> str:
    has_seen = any(piece.seen is not None for piece in rows)
    heads = ["token", "p", "logprob", "entropy", *(["rank"] if has_seen else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    wide = '<th scope="col" class="wide">likeliest</th>' if has_seen else ""
    body = "".join(f"<tr>{_row(piece, has_seen)}</tr>" for piece in rows)
    return f"<table><thead><tr>{head}{wide}</tr></thead><tbody>{body}</tbody></table>"


def _row(piece: Piece, has_seen: bool) -> str:
    cells = [tips.quoted(piece.text), *tips.figures(piece)]
    wide = ""
    if has_seen:
        seen = piece.seen
        cells.append("" if seen is None else str(seen.rank + 1))
        likely = [] if seen is None else [e for e in seen.top if e.p >= _LISTED]
        said = " ".join(f"<span>{as_html(tips.alternative(each))}</span>" for each in likely)
        wide = f'<td class="wide">{said}</td>'
    return "".join(f"<td>{as_html(cell)}</td>" for cell in cells) + wide
