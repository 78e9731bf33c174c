"""A loom tree as a Graphviz digraph and as a Mermaid flowchart."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .color_scale import PROBABILITY
from .outline import NOTHING, breadth_first, counted, facts, geometric_mean_p, headline
from .terminal import cut, escape_controls, one_line

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

_WIDTH, _DOT_LONGEST = 34, 160
# The steps of the probability scale on white.
_FILLS = ("#ffffff", "#fbf1e2", "#f8e2c4", "#f3cfa2", "#ebb680", "#e29b5f")
_HEAD = """digraph weft {
  charset="UTF-8"
  rankdir=LR
  nodesep=0.18
  ranksep=0.45
  bgcolor="transparent"
  node [shape=box, style="rounded,filled", color="#8a8f98", fillcolor="#ffffff",
        fontcolor="#1c1e21", fontname="Helvetica,Arial,sans-serif", fontsize=11, margin="0.16,0.09"]
  edge [color="#8a8f98", fontcolor="#5c626b", fontname="Helvetica,Arial,sans-serif", fontsize=10,
        arrowsize=0.6]
"""


def to_dot(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    limit: int | None = None,
) -> str:
    """Return the tree from `root` down as Graphviz source text, colored by mean probability.

    Args:
        root: the node from which to draw.
        node: returns the label of a node's box; None: its text and statistics.
        edge: returns the label of the line to a node; None: no labels.
        limit: maximum number of nodes, nearest to the root first; an extra box counts the rest.
            None: no limit.
    """
    shown = breadth_first(root, limit)
    names = {id(each): f"n{number}" for number, each in enumerate(shown)}
    lines = [*_dot_boxes(shown, names, node), *_dot_edges(shown, names, edge)]
    if rest := root.count_children() - len(shown):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'more [label="{more}", shape=plaintext, style=""]')
    return _HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"


def _dot_boxes(shown: list[Heddle], names: dict[int, str], node: Label | None) -> Iterator[str]:
    """Yield a DOT statement for the box of each node.

    names: DOT names of the nodes, by `id(node)`.
    """
    for heddle in shown:
        label = _escape_dot(_default_label(heddle) if node is None else node(heddle))
        fill = _FILLS[PROBABILITY.level(geometric_mean_p(heddle))] if heddle.logprobs else ""
        more = f', fillcolor="{fill}"' if fill else ""
        width = ", penwidth=2" if heddle.parent is None else ""
        yield f'{names[id(heddle)]} [label="{label}"{more}{width}]'


def _dot_edges(shown: list[Heddle], names: dict[int, str], edge: Label | None) -> Iterator[str]:
    """Yield a DOT statement for the line from each node's parent to the node.

    names: DOT names of the nodes, by `id(node)`.
    """
    for heddle in shown[1:]:
        label = "" if edge is None else f' [label="{_escape_dot(edge(heddle))}"]'
        yield f"{names[id(heddle.parent)]} -> {names[id(heddle)]}{label}"


def _default_label(each: Heddle) -> str:
    """Return a node's default label: its text, wrapped and shortened, and its statistics.

    It has line ends and is not escaped for DOT yet.
    """
    text = textwrap.wrap(cut(one_line(headline(each)), _DOT_LONGEST), _WIDTH) or ["(ended at once)"]
    return "\n".join([*text, " · ".join(facts(each))])


def _escape_dot(text: str) -> str:
    r"""Return a text escaped for a quoted DOT label; `\l` ends each line, which aligns it left."""
    text = escape_controls(text.strip("\n"), keep="\n").replace("\t", "    ")
    safe = text.replace("\\", "\\\\").replace('"', '\\"')
    lines = safe.split("\n")
    return lines[0] if len(lines) == 1 else "".join(f"{line}\\l" for line in lines)


# Mermaid rejects more than 500 lines between boxes, and more than 50,000 characters.
LIMIT = 150
_ROOM = 48_000
_MERMAID_LONGEST = 60


def to_mermaid(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    limit: int | None = LIMIT,
) -> str:
    """Return the tree from `root` down as source text of a Mermaid flowchart, for Markdown files.

    Args:
        root: the node from which to draw.
        node: returns the label of a node's box; None: its text and statistics.
        edge: returns the label of the line to a node; None: no labels.
        limit: maximum number of nodes, nearest to the root first; None: as many as Mermaid accepts.
            An extra box counts the rest.
    """
    numbers: dict[int, int] = {}
    lines = ["flowchart LR"]
    size = len(lines[0])
    for heddle in breadth_first(root, min(limit, 500) if limit is not None else 500):
        box_lines = _mermaid_lines(heddle, numbers, node, edge)
        size += sum(len(line) + 3 for line in box_lines)
        if size > _ROOM:
            break
        lines += [f"  {line}" for line in box_lines]
    if rest := root.count_children() - len(numbers):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'  more["{_escape_mermaid(more)}"]:::more')
        lines.append("  classDef more fill:none,stroke:none")
    return "\n".join(lines) + "\n"


def _mermaid_lines(
    each: Heddle, numbers: dict[int, int], node: Label | None, edge: Label | None
) -> list[str]:
    """Return the Mermaid statements of a node: its box, and the line from its parent.

    numbers: numbers of the nodes before, by `id(node)`; the function adds this node.
    """
    name = f"n{len(numbers)}"
    label = _mermaid_label(each) if node is None else _escape_mermaid(node(each)) or " "
    parent_number = numbers.get(id(each.parent)) if each.parent is not None else None
    numbers[id(each)] = len(numbers)
    box = f'{name}["{label}"]'
    if parent_number is None:
        return [box]
    edge_label = "" if edge is None or not (text := _escape_mermaid(edge(each))) else f'|"{text}"|'
    return [box, f"n{parent_number} -->{edge_label} {name}"]


def _mermaid_label(each: Heddle) -> str:
    """Return a node's default label: its shortened text and its statistics, escaped."""
    text = cut(one_line(headline(each)), _MERMAID_LONGEST) or NOTHING
    return f"{_escape_mermaid(text)}<br/>{_escape_mermaid(' · '.join(facts(each)))}"


def _escape_mermaid(text: str) -> str:
    """Return a text escaped for a Mermaid label.

    All characters but word characters and spaces become character codes. Otherwise Mermaid would
    read Markdown and HTML in labels, where "1. " is a list and "end" a keyword.
    """
    return re.sub(r"[^\w ]|_", lambda match: f"#{ord(match[0])};", one_line(text))
