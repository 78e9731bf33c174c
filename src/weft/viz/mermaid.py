"""A reasoning tree in Mermaid's language, which GitHub, GitLab and notebooks draw."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .escape import cut, one_line
from .facts import NOTHING, counted, facts, headline
from .outline import nearest

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

# Mermaid refuses more than 500 lines between boxes, and more than 50,000 characters.
LIMIT = 150
_ROOM = 48_000
_LONGEST = 60


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
    for each in nearest(root, min(limit, 500) if limit is not None else 500):
        made = _lines(each, numbers, node, edge)
        size += sum(len(line) + 3 for line in made)
        if size > _ROOM:
            break
        lines += [f"  {line}" for line in made]
    if rest := root.count_children() - len(numbers):
        more = f"… {counted(rest, 'more node')}"
        lines.append(f'  more["{_escaped(more)}"]:::more')
        lines.append("  classDef more fill:none,stroke:none")
    return "\n".join(lines) + "\n"


def _lines(
    each: Heddle, numbers: dict[int, int], node: Label | None, edge: Label | None
) -> list[str]:
    name = f"n{len(numbers)}"
    label = _standard(each) if node is None else _escaped(node(each)) or " "
    above = numbers.get(id(each.parent)) if each.parent is not None else None
    numbers[id(each)] = len(numbers)
    box = f'{name}["{label}"]'
    if above is None:
        return [box]
    said = "" if edge is None or not (text := _escaped(edge(each))) else f'|"{text}"|'
    return [box, f"n{above} -->{said} {name}"]


def _standard(each: Heddle) -> str:
    text = cut(one_line(headline(each)), _LONGEST) or NOTHING
    return f"{_escaped(text)}<br/>{_escaped(' · '.join(facts(each)))}"


def _escaped(text: str) -> str:
    """Return the text with all but letters, digits and spaces as Mermaid's character codes.

    Labels are Markdown with HTML in them, in which "1. " is a list and "end" a keyword.
    """
    return re.sub(r"[^\w ]|_", lambda found: f"#{ord(found[0])};", one_line(text))
