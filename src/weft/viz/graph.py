"""A reasoning tree as a graph, in Graphviz's language and in Mermaid's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .color_scale import PROBABILITY
from .outline import NOTHING, breadth_first, counted, facts, headline
from .terminal import cut, escape_controls, one_line

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

_WIDTH, _DOT_LONGEST = 34, 160
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
    shown = breadth_first(root, limit)
    names = {id(each): f"n{number}" for number, each in enumerate(shown)}
    lines = [*_boxes(shown, names, node), *_dot_lines(shown, names, edge)]
    if rest := root.count_children() - len(shown):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'more [label="{more}", shape=plaintext, style=""]')
    return _HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"


def _boxes(shown: list[Heddle], names: dict[int, str], node: Label | None) -> Iterator[str]:
    for each in shown:
        label = _quoted(_dot_label(each) if node is None else node(each))
        fill = _FILLS[PROBABILITY.level(each.mean_p)] if each.logprobs else ""
        more = f', fillcolor="{fill}"' if fill else ""
        width = ", penwidth=2" if each.parent is None else ""
        yield f'{names[id(each)]} [label="{label}"{more}{width}]'


def _dot_lines(shown: list[Heddle], names: dict[int, str], edge: Label | None) -> Iterator[str]:
    for each in shown[1:]:
        label = "" if edge is None else f' [label="{_quoted(edge(each))}"]'
        yield f"{names[id(each.parent)]} -> {names[id(each)]}{label}"


def _dot_label(each: Heddle) -> str:
    text = textwrap.wrap(cut(one_line(headline(each)), _DOT_LONGEST), _WIDTH) or ["(ended at once)"]
    return "\n".join([*text, " · ".join(facts(each))])


def _quoted(text: str) -> str:
    r"""Return a label's inside: `\l` ends a line flush left, and nothing else is an escape."""
    text = escape_controls(text.strip("\n"), keep="\n").replace("\t", "    ")
    safe = text.replace("\\", "\\\\").replace('"', '\\"')
    lines = safe.split("\n")
    return lines[0] if len(lines) == 1 else "".join(f"{line}\\l" for line in lines)


# Mermaid refuses more than 500 lines between boxes, and more than 50,000 characters.
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
    """Return the tree from `root` down as a flowchart, in what Mermaid takes at its defaults.

    Args:
        node, edge: what to write in a box and on the line to it.
        limit: nodes at most, those nearest to the root; None: as many as Mermaid takes. The rest
            is counted in a box of its own.
    """
    numbers: dict[int, int] = {}
    lines = ["flowchart LR"]
    size = len(lines[0])
    for each in breadth_first(root, min(limit, 500) if limit is not None else 500):
        made = _mermaid_lines(each, numbers, node, edge)
        size += sum(len(line) + 3 for line in made)
        if size > _ROOM:
            break
        lines += [f"  {line}" for line in made]
    if rest := root.count_children() - len(numbers):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'  more["{_escaped(more)}"]:::more')
        lines.append("  classDef more fill:none,stroke:none")
    return "\n".join(lines) + "\n"


def _mermaid_lines(
    each: Heddle, numbers: dict[int, int], node: Label | None, edge: Label | None
) -> list[str]:
    name = f"n{len(numbers)}"
    label = _mermaid_label(each) if node is None else _escaped(node(each)) or " "
    above = numbers.get(id(each.parent)) if each.parent is not None else None
    numbers[id(each)] = len(numbers)
    box = f'{name}["{label}"]'
    if above is None:
        return [box]
    said = "" if edge is None or not (text := _escaped(edge(each))) else f'|"{text}"|'
    return [box, f"n{above} -->{said} {name}"]


def _mermaid_label(each: Heddle) -> str:
    text = cut(one_line(headline(each)), _MERMAID_LONGEST) or NOTHING
    return f"{_escaped(text)}<br/>{_escaped(' · '.join(facts(each)))}"


def _escaped(text: str) -> str:
    """Return the text with all but letters, digits and spaces as Mermaid's character codes.

    Labels are Markdown with HTML in them, in which "1. " is a list and "end" a keyword.
    """
    return re.sub(r"[^\w ]|_", lambda found: f"#{ord(found[0])};", one_line(text))
