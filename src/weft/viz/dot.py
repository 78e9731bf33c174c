"""A reasoning tree in Graphviz's language: `dot -Tsvg tree.dot > tree.svg`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .escape import cut, one_line, visible
from .facts import counted, facts, headline
from .outline import nearest
from .tints import PROBABILITY

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

_WIDTH, _LONGEST = 34, 160
# The steps of the probability ramp on white.
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
    """Return the tree from `root` down as a digraph; boxes are tinted by mean probability.

    Args:
        node, edge: what to write in a box and on the line to it.
        limit: nodes at most, those nearest to the root; the rest is counted in a box of its own.
    """
    shown = nearest(root, limit)
    names = {id(each): f"n{number}" for number, each in enumerate(shown)}
    lines = [*_boxes(shown, names, node), *_lines(shown, names, edge)]
    if rest := root.count_children() - len(shown):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'more [label="{more}", shape=plaintext, style=""]')
    return _HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"


def _boxes(shown: list[Heddle], names: dict[int, str], node: Label | None) -> Iterator[str]:
    for each in shown:
        label = _quoted(_standard(each) if node is None else node(each))
        fill = _FILLS[PROBABILITY.level(each.mean_p)] if each.logprobs else ""
        more = f', fillcolor="{fill}"' if fill else ""
        width = ", penwidth=2" if each.parent is None else ""
        yield f'{names[id(each)]} [label="{label}"{more}{width}]'


def _lines(shown: list[Heddle], names: dict[int, str], edge: Label | None) -> Iterator[str]:
    for each in shown[1:]:
        label = "" if edge is None else f' [label="{_quoted(edge(each))}"]'
        yield f"{names[id(each.parent)]} -> {names[id(each)]}{label}"


def _standard(each: Heddle) -> str:
    text = textwrap.wrap(cut(one_line(headline(each)), _LONGEST), _WIDTH) or ["(ended at once)"]
    return "\n".join([*text, " · ".join(facts(each))])


def _quoted(text: str) -> str:
    r"""Return a label's inside: `\l` ends a line flush left, and nothing else is an escape."""
    text = visible(text.strip("\n"), keep="\n").replace("\t", "    ")
    safe = text.replace("\\", "\\\\").replace('"', '\\"')
    lines = safe.split("\n")
    return lines[0] if len(lines) == 1 else "".join(f"{line}\\l" for line in lines)
