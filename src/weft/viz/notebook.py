"""A reasoning tree in a notebook's output: static HTML that outlives the kernel.

No style sheet and no script: sites that show saved notebooks strip both. What is left without
styles is still nested lists that fold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..loom import Loom
from . import tips
from .escape import as_html, cut
from .facts import NOTHING, counted, facts, headline
from .outline import Item, outline
from .pieces import Piece, pieces
from .text import draw
from .tints import PROBABILITY

if TYPE_CHECKING:
    from ..loom import Heddle

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
        if not isinstance(each, Item):
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


def _item(each: Item, marked: frozenset[int]) -> str:
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
    tip = as_html(tips.tip(piece)).replace("\n", "&#10;")
    styled = f' style="{style}"' if style else ""
    return f'<span title="{tip}"{styled}>{as_html(text)}</span>'
