"""Reasoning trees as the command draws them: equal siblings once, the long tails counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from .out import Out
from .turns import said_at

if TYPE_CHECKING:
    from ..loom import Heddle

# Scores from here on are drawn as good, and below as bad.
GOOD, BAD = 0.5, 0.05
_MIN_LABEL = 24


class Shown(NamedTuple):
    """One line below a node: equal siblings stand for each other; no node: siblings left out."""

    nodes: tuple[Heddle, ...]
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """What to draw of a tree, and how.

    numbers: written before a node. path: nodes drawn bold, and always drawn. top: children of a
    node that are drawn at most, best scores first; 0: all of them, in their order. focus: beside
    its path only what is below it is drawn.
    """

    out: Out
    numbers: dict[str, int] = field(default_factory=dict)
    path: frozenset[str] = frozenset()
    top: int = 0
    focus: frozenset[str] = frozenset()

    def lines(self, root: Heddle) -> Iterator[Text]:
        """Yield the drawing, from `root` down. Cost: O(nodes), however deep."""
        from ..viz.text import ASCII, UNICODE, rails_shown

        style, width = ASCII if self.out.is_ascii else UNICODE, self.out.width
        stack: list[tuple[Shown, str, str, int]] = [(Shown((root,)), "", "", 0)]
        while stack:
            shown, rails, joint, depth = stack.pop()
            yield self._line(shown, rails_shown(rails, depth, width, style) + joint)
            if not shown.nodes:
                continue
            below = self._below(shown.nodes[0])
            inner = rails + {"": "", style.tee: style.pipe, style.corner: style.blank}[joint]
            joints = [style.tee] * (len(below) - 1) + [style.corner]
            stack += [
                # Only the last columns are ever shown.
                (each, inner[-width:], joint, depth + 1)
                for each, joint in zip(below, joints, strict=False)
            ][::-1]

    def _below(self, node: Heddle) -> list[Shown]:
        groups: dict[str, list[Heddle]] = {}
        last = len(self.numbers)
        # Numbers once told stay, so they give the order.
        for child in sorted(node.children, key=lambda child: self.numbers.get(child.id, last)):
            # What goes on is drawn on its own; only leaves stand for each other.
            groups.setdefault(child.id if child.children else child.text, []).append(child)
        below = [Shown(tuple(group)) for group in groups.values()]
        chosen = [each for each in below if any(n.id in self.focus for n in each.nodes)]
        if chosen:
            left_out = len(node.children) - sum(len(each.nodes) for each in chosen)
            return [*chosen, Shown((), left_out)] if left_out else chosen
        if not self.top:
            return below
        below.sort(key=lambda shown: _rank(shown.nodes[0].score))
        chosen = [each for at, each in enumerate(below) if at < self.top or self._on_path(each)]
        left_out = len(node.children) - sum(len(each.nodes) for each in chosen)
        return [*chosen, Shown((), left_out)] if left_out else chosen

    def _on_path(self, shown: Shown) -> bool:
        return any(node.id in self.path for node in shown.nodes)

    def _line(self, shown: Shown, rails: str) -> Text:
        if not shown.nodes:
            return self.out.text((rails, "dim"), (f"… {shown.n_left_out} more", "dim"))
        node = shown.nodes[0]
        number = " ".join(str(self.numbers[n.id]) for n in shown.nodes if n.id in self.numbers)
        facts = "" if node.parent is None else " · ".join(_facts(shown.nodes))
        number, facts = number and f"{number}  ", facts and f"  {facts}"
        room = self.out.width - cell_len(rails) - len(number) - cell_len(facts)
        label = self.out.fit(label_of(node).strip(), max(room, _MIN_LABEL))
        style = "bold" if node.parent is None or self._on_path(shown) else _style(node)
        return self.out.text((rails, "dim"), (number, "cyan"), (label, style), (facts, "dim"))


def _rank(score: float | None) -> float:
    """The best scores first, then what has none."""
    return math.inf if score is None else -score


def label_of(node: Heddle) -> str:
    """Return what a node is called in a picture."""
    said = said_at(node)
    if said is not None:
        return f"> {said}"
    asked: str = getattr(node, "user_prompt", "")
    return asked or node.text or "(ended at once)"


def _facts(nodes: Sequence[Heddle]) -> list[str]:
    node = nodes[0]
    facts = [f"×{len(nodes)}"] if len(nodes) > 1 else []
    if node.score is not None:
        return [*facts, f"{node.score:z.2f}"]
    facts.append(f"{len(node.tokens)} tok")
    if node.logprobs:
        facts.append(f"p {node.mean_p:.2f}")
    if node.terminal:
        facts.append("end")
    elif node.finish_reason is not None:
        facts.append(node.finish_reason)
    return facts


def _style(node: Heddle) -> str:
    if node.score is not None:
        # Below 0 it is a mean logprob.
        good = node.score if node.score >= 0 else math.exp(node.score)
        return "green" if good >= GOOD else "dim" if good < BAD else "yellow"
    if not node.logprobs:
        return ""
    return "green" if node.mean_p >= 0.8 else "yellow" if node.mean_p >= 0.5 else "red"
