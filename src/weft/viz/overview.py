"""What a large tree looks like from afar: a bar for each branch, and the best path in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..loom import Loom
from .escape import as_html, cut, one_line
from .facts import NOTHING, counted, facts, headline
from .outline import End, Item
from .tints import PROBABILITY
from .tokens import Told

if TYPE_CHECKING:
    from ..loom import Heddle

# The picture is so many units wide; bars that would begin less than one after another are left out.
_WIDE, _LEAST = 1000, 0.5
_TALLEST, _ROW = 220, 22
_STEPS = 5
# Nodes of a path that are listed: the first and the last ones.
_FIRST, _LAST = 4, 8
_LINE = 90


class Bar(NamedTuple):
    """A branch in the picture: its row from the top, its place and width in units."""

    item: Item
    row: int
    x: float
    width: float


def overview(told: Sequence[Item | End], page: Told, path: Sequence[Heddle], heading: str) -> str:
    """Return the picture of what is told, and the nodes of a path as a list of links."""
    return f'<section class="over" aria-label="Overview">\n{_picture(told, page)}' + (
        f"<h2>{as_html(heading)}</h2>\n<ol>\n{''.join(_steps(path, page))}</ol>\n</section>\n"
        if path
        else "</section>\n"
    )


def _picture(told: Sequence[Item | End], page: Told) -> str:
    bars = list(_bars([item for item in told if isinstance(item, Item)]))
    n_rows = 1 + max((bar.row for bar in bars), default=0)
    tall = min(_ROW, _TALLEST / n_rows)
    tints = _by_score(bars) or _by_p(bars)
    rects = "".join(_rects(bars, tints, page, tall))
    by = "the better its score" if _has_scores(bars) else "the less likely its tokens"
    said = f"{counted(len(bars), 'branch', 'branches')} in {counted(n_rows, 'level')}"
    return (
        f'<figure><svg role="img" aria-label="{said}" viewBox="0 0 {_WIDE} {n_rows * tall:.1f}" '
        f'preserveAspectRatio="none" style="height:{n_rows * tall:.0f}px">{rects}</svg>\n'
        '<figcaption class="soft">A bar is a branch: the wider, the more leaves below it; the '
        f"darker, {by}. Green is the path.</figcaption></figure>\n"
    )


def _bars(items: Sequence[Item]) -> Iterator[Bar]:
    """Yield a bar for each item below the prompt: its width is its share of the leaves."""
    above = _above(items)
    leaves = [0 if item.n_branches else 1 for item in items]
    for at in range(len(items) - 1, 0, -1):
        leaves[above[at]] += leaves[at]
    unit = _WIDE / leaves[0]
    begins = [0.0] * len(items)
    # Where the next item below each one begins.
    free = [0.0] * len(items)
    has_root = not all(isinstance(node, Loom) for node in items[0].nodes)
    for at, item in enumerate(items):
        if at:
            begins[at] = free[above[at]]
            free[above[at]] += leaves[at] * unit
        free[at] = begins[at]
        if at or has_root:
            yield Bar(item, item.forks - (not has_root), begins[at], leaves[at] * unit)


def _above(items: Sequence[Item]) -> list[int]:
    """Return for each item which one it stands below; 0 for the first."""
    above, at_fork = [], {-1: 0}
    for at, item in enumerate(items):
        above.append(at_fork[item.forks - 1])
        at_fork[item.forks] = at
    return above


def _rects(bars: Sequence[Bar], tints: Mapping[int, str], page: Told, tall: float) -> Iterator[str]:
    ends: dict[int, float] = {}
    for at, (item, row, x, width) in enumerate(bars):
        first = next(node for node in item.nodes if not isinstance(node, Loom))
        is_on = first.id in page.marked
        if not is_on and x - ends.get(row, -_LEAST) < _LEAST:
            continue
        ends[row] = x
        tint = "on" if is_on else tints[at]
        shown = max(width - min(1.0, width / 8), _LEAST)
        yield (
            f'<rect class="{tint}" x="{x:.1f}" y="{row * tall:.1f}" width="{shown:.1f}" '
            f'height="{tall - min(1.0, tall / 8):.1f}" data-n="n-{as_html(first.id)}"/>'
        )


def _has_scores(bars: Sequence[Bar]) -> bool:
    return any(node.score is not None for bar in bars for node in bar.item.nodes)


def _by_score(bars: Sequence[Bar]) -> dict[int, str]:
    """Return a class for each bar: s0, the worst score or none, to s5; empty without scores."""
    if not _has_scores(bars):
        return {}
    found = {at: _score(bar.item.nodes) for at, bar in enumerate(bars)}
    scores = [s for s in found.values() if s is not None and math.isfinite(s)] or [0.0]
    low, high = min(scores), max(scores)
    # Halves: the difference of two large scores may be infinite.
    span = high / 2 - low / 2

    def step(score: float | None) -> int:
        if score is None or math.isnan(score):
            return 0
        share = (score / 2 - low / 2) / span if span else float(score >= high)
        return round(_STEPS * min(max(share, 0.0), 1.0))

    return {at: f"s{step(score)}" for at, score in found.items()}


def _score(nodes: Sequence[Heddle]) -> float | None:
    return next((node.score for node in reversed(nodes) if node.score is not None), None)


def _by_p(bars: Sequence[Bar]) -> dict[int, str]:
    """Return a class for each bar, by the mean probability of its first sampled node."""
    found = {}
    for at, bar in enumerate(bars):
        sampled = [node for node in bar.item.nodes if node.logprobs]
        found[at] = f"p{PROBABILITY.level(sampled[0].mean_p) if sampled else 0}"
    return found


def _steps(path: Sequence[Heddle], page: Told) -> Iterator[str]:
    nodes = [node for node in path if not isinstance(node, Loom) and node.id in page.numbers]
    left_out = len(nodes) - _FIRST - _LAST
    for at, node in enumerate(nodes):
        if left_out > 1 and _FIRST <= at < _FIRST + left_out:
            if at == _FIRST:
                yield f'<li class="soft">… {counted(left_out, "more node")}</li>\n'
            continue
        text = one_line(headline(node) if page.node is None else page.node(node), mark=" ")
        figures = "" if page.node is not None else as_html(" · ".join(facts(node)[1:]))
        number = page.numbers[node.id]
        yield (
            f'<li><a class="no" href="#{number}">{number}</a> '
            f'<span dir="auto">{as_html(cut(text, _LINE)) or NOTHING}</span> '
            f'<span class="soft">{figures}</span></li>\n'
        )
