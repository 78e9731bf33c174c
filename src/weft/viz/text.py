"""A reasoning tree as lines of text: for terminals, logs and, escaped, for notebooks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from .escape import one_line
from .out import WIDTH, Out, can_write
from .outline import facts, headline

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]
T = TypeVar("T")

# Below this a label is not shortened further, however deep it stands.
MIN_LABEL = 24


class Style(NamedTuple):
    """The characters of one drawing: four columns a level, and what stands for cut text."""

    tee: str
    corner: str
    pipe: str
    blank: str
    cut: str
    dot: str
    deep: str
    times: str


UNICODE = Style("├── ", "└── ", "│   ", "    ", "…", "·", "⋯", "×")
ASCII = Style("|-- ", "`-- ", "|   ", "    ", "...", ",", "~", "x")


def lines(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    width: int = WIDTH,
    style: Style = UNICODE,
) -> Iterator[tuple[Text, int]]:
    """Yield the lines of the tree from `root` down, and for how many nodes each stands.

    Leaves that look equal are one line. Cost: O(nodes), however deep.
    """

    def below(equal: list[Heddle]) -> list[list[Heddle]]:
        return folded(equal[0].children, node, edge)

    for equal, rails in railed([root], below, width, style):
        yield _line(equal, rails, node, edge, width, style), len(equal)


def railed(
    top: T, below: Callable[[T], Sequence[T]], width: int, style: Style
) -> Iterator[tuple[T, str]]:
    """Yield what has a line of its own, from the top down, with the rails before it.

    below: what hangs on it. Cost: O(lines), however deep.
    """
    stack = [(top, "", "", 0)]
    inside = {"": "", style.tee: style.pipe, style.corner: style.blank}
    while stack:
        each, rails, joint, depth = stack.pop()
        yield each, _shown(rails, depth, width, style) + joint
        # Only the last columns are ever shown: keeping more would make deep trees quadratic.
        rails = (rails + inside[joint])[-width:]
        joint = style.corner
        for under in reversed(below(each)):
            stack.append((under, rails, joint, depth + 1))
            joint = style.tee


def folded(
    children: Sequence[Heddle], node: Label | None, edge: Label | None
) -> list[list[Heddle]]:
    """Return children in order; leaves that would be drawn with the same words stand together."""
    groups: dict[object, list[Heddle]] = {}
    for child in children:
        words = (child.text, node and node(child), edge and edge(child))
        groups.setdefault(child.id if child.children else words, []).append(child)
    return list(groups.values())


def draw(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    width: int = WIDTH,
    style: Style = UNICODE,
    limit: int | None = None,
) -> Iterator[str]:
    """Yield the drawing line by line, without colours; after `limit` lines the rest is counted."""
    made = lines(root, node=node, edge=edge, width=width, style=style)
    rest = root.count_children() if limit is not None else 0
    for line, n in itertools.islice(made, limit):
        rest -= n
        yield line.plain.rstrip()
    if rest > 0:
        yield _more(rest, style)


def _more(n_nodes: int, style: Style) -> str:
    return f"{style.cut} {n_nodes} more node{'s' if n_nodes != 1 else ''}"


def show(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    file: TextIO | None = None,
    limit: int | None = None,
) -> None:
    """Write the drawing to `file` (standard output): coloured and as wide as a terminal is."""
    file = sys.stdout if file is None else file
    out = Out.of(file)
    width, style = out.width, ASCII if out.is_ascii else UNICODE
    if not out.is_terminal:
        for line in draw(root, node=node, edge=edge, width=width, style=style, limit=limit):
            file.write(_encodable(file, line) + "\n")
        return
    made = lines(root, node=node, edge=edge, width=width, style=style)
    rest = root.count_children() if limit is not None else 0
    for text, n in itertools.islice(made, limit):
        rest -= n
        out.console.print(text)
    if rest > 0:
        out.console.print(_more(rest, style), style="dim")


def _shown(rails: str, depth: int, width: int, style: Style) -> str:
    """Return the rails, or how deep we are and the last of them when they would fill the width."""
    columns = 4 * max(depth - 1, 0)
    room = width // 2
    if columns <= room:
        return rails
    mark = f"{style.deep}{depth} "
    keep = (room - len(mark)) // 4 * 4
    return mark + (rails[-keep:] if keep > 0 else "")


def _line(
    equal: Sequence[Heddle],
    rails: str,
    node: Label | None,
    edge: Label | None,
    width: int,
    style: Style,
) -> Text:
    at, n = equal[0], len(equal)
    before = f"{_clean(edge(at), style)} " if edge is not None and at.parent is not None else ""
    told = [*([f"{style.times}{n}"] if n > 1 else []), *(facts(at) if node is None else [])]
    figures = "  " + f" {style.dot} ".join(told) if told else ""
    label = _clean(headline(at) if node is None else node(at), style)
    room = max(width - len(rails + figures) - _cells(before), MIN_LABEL)
    line = Text(no_wrap=True)
    line.append(rails, "dim").append(before, "cyan")
    line.append(_fit(label, room, style), colour_of(at.mean_p) if at.logprobs else "bold")
    return line.append(figures, "dim")


def _clean(text: str, style: Style) -> str:
    """Return the text on one line, with what a terminal would obey written out."""
    return one_line(text, mark="\\n" if style is ASCII else "⏎")


def _fit(text: str, room: int, style: Style) -> str:
    # A label of thousands of characters is cut before it is measured.
    text = text[: 2 * room]
    if _cells(text) <= room:
        return text
    return set_cell_size(text, room - len(style.cut)).rstrip() + style.cut


def _cells(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def colour_of(p: float) -> str:
    """Return the colour of a node whose tokens have this mean probability."""
    return "green" if p >= 0.8 else "yellow" if p >= 0.5 else "red"


def _encodable(file: TextIO, line: str) -> str:
    if can_write(file.encoding, line):
        return line
    encoding = file.encoding or "utf-8"
    return line.encode(encoding, errors="backslashreplace").decode(encoding)
