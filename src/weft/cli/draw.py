"""What is drawn while branches grow and when they have: lanes, texts, the tree, the savings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.text import Text

from .kept import said_at
from .out import Out, Tint, counted, legend, tinted

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle
    from ..results import Delta
    from .kept import Kept

_WHOLE = 40  # nodes up to which a tree is drawn whole after each growth


def grow_watched(
    out: Out,
    lm: LM,
    kept: Kept,
    node: Heddle,
    n: int,
    sampling: dict[str, Any],
    watcher: LaneWatcher | None = None,
    *,
    force: bool = False,
) -> tuple[list[Heddle], bool]:
    """Grow n branches at a node while they are watched; return them in order, and whether all came.

    watcher: what shows them; None takes lanes on a terminal, plain lines elsewhere.
    On Ctrl-C they are as far as they came. The reader then stands at the likeliest.
    """
    from ..loom.node import by_call
    from .kept import best_of

    kept.numbers()
    before = {child.id for child in node.children}
    deltas = node.stream(n=n, force=force, **sampling)
    done = watch(watcher or _watcher(out, lm, node, n, kept.numbering.next), deltas)
    made = by_call(child for child in node.children if child.id not in before)
    kept.numbers()
    kept.at = best_of(made) or node
    return made, done


def show_growth(
    out: Out, lm: LM, kept: Kept, made: Sequence[Heddle], tint: Tint | None, *, is_kept: bool
) -> None:
    """Show the texts where the tree has no room for them, the tree, and what was saved."""
    numbers = kept.numbers()
    if out.is_live or tint is not None:
        show_texts(out, lm, [(numbers[node.id], node) for node in made], tint)
    elif made:
        out.line()
    show_tree(out, kept, made)
    out.line()
    show_cost(out, lm, kept, is_kept=is_kept)


def show_cost(out: Out, lm: LM, kept: Kept, *, is_kept: bool) -> None:
    """Write what was computed and saved, and the name of the loom."""
    told = f" · kept as {kept.name}" if is_kept else ""
    out.facts(str(lm.stats()) + told)


def show_tree(out: Out, kept: Kept, made: Sequence[Heddle] = ()) -> None:
    """Draw the loom; of a large one the path to the new branches, and these."""
    focus: frozenset[str] = frozenset()
    if made and made[0].parent is not None and kept.loom.count_children() > _WHOLE:
        focus = frozenset(node.id for node in made[0].parent.path[1:])
    out.lines(Picture(out, below_root(kept), focus=focus).lines(kept.loom))


def below_root(kept: Kept) -> dict[str, int]:
    """Return the numbers to draw: the root's is always 0 and is not written."""
    numbers = dict(kept.numbers())
    numbers.pop(kept.loom.id, None)
    return numbers


def show_texts(out: Out, lm: LM, branches: Sequence[tuple[int, Heddle]], tint: Tint | None) -> None:
    """Write out what does not fit into the tree's lines; equal texts once."""
    same: dict[str, list[tuple[int, Heddle]]] = {}
    for number, node in branches:
        same.setdefault(node.text.strip("\n"), []).append((number, node))
    if tint is None and all("\n" not in text and len(text) < out.width - 40 for text in same):
        return
    if tint is not None:
        out.lines([legend(out, tint)])
        out.line()
    for text, group in same.items():
        head = " ".join(str(number) for number, _ in group)
        out.block(head, text if tint is None else _stripped(out, lm, group[0][1], tint))
        out.line()


def _stripped(out: Out, lm: LM, node: Heddle, tint: Tint) -> Text:
    made = tinted(out, lm.text, node, tint)
    start = len(made.plain) - len(made.plain.lstrip("\n"))
    return made[start:]


def _watcher(out: Out, lm: LM, node: Heddle, n: int, first: int) -> LaneWatcher:
    if not out.is_live:
        return Printer(out, n, first=first)
    counters = lm.scheduler.counters
    before, length = counters.prefilled, sum(len(each.tokens) for each in node.path)

    def waiting() -> str:
        done = min(counters.prefilled - before, length)
        of = f", {100 * done // length} %" if done and length else ""
        return f"reading {counted(length, 'token')}{of} …"

    return Lanes(out, n, waiting, first=first)


# Scores from here on are drawn as good, and below as bad.
GOOD, BAD = 0.5, 0.05
_MIN_LABEL = 24


class PictureLine(NamedTuple):
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
        stack: list[tuple[PictureLine, str, str, int]] = [(PictureLine((root,)), "", "", 0)]
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

    def _below(self, node: Heddle) -> list[PictureLine]:
        groups: dict[str, list[Heddle]] = {}
        last = len(self.numbers)
        # Numbers once told stay, so they give the order.
        for child in sorted(node.children, key=lambda child: self.numbers.get(child.id, last)):
            # What goes on is drawn on its own; only leaves stand for each other.
            groups.setdefault(child.id if child.children else child.text, []).append(child)
        below = [PictureLine(tuple(group)) for group in groups.values()]
        chosen = [each for each in below if any(n.id in self.focus for n in each.nodes)]
        if chosen:
            left_out = len(node.children) - sum(len(each.nodes) for each in chosen)
            return [*chosen, PictureLine((), left_out)] if left_out else chosen
        if not self.top:
            return below
        below.sort(key=lambda shown: _rank(shown.nodes[0].score))
        chosen = [each for at, each in enumerate(below) if at < self.top or self._on_path(each)]
        left_out = len(node.children) - sum(len(each.nodes) for each in chosen)
        return [*chosen, PictureLine((), left_out)] if left_out else chosen

    def _on_path(self, shown: PictureLine) -> bool:
        return any(node.id in self.path for node in shown.nodes)

    def _line(self, shown: PictureLine, rails: str) -> Text:
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


_REDRAWS_PER_S = 10
_MAX_LINES = 6  # of one lane
BETWEEN = "---"  # a line between texts that are written alone


class LaneWatcher(Protocol):
    """Shows deltas as they come; a context manager."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def push(self, delta: Delta) -> None:
        """Take a delta."""
        ...


class Lane:
    """One branch: its text so far, and why it ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.ended: str | None = None

    def push(self, delta: Delta) -> None:
        """Take a delta of this branch."""
        self.text += delta.text
        self.ended = delta.finish_reason

    def lines(self, out: Out, height: int) -> list[Text]:
        """Return the end of the text in at most `height` lines."""
        mark = "✓" if self.ended == "stop" else "-" if self.ended else " "
        head = f"{self.number:>2}{mark} "
        cut = "..." if out.is_ascii else "…"
        room = max(out.width - len(head) - 1, 8)
        shown = out.shown(self.text).lstrip("\n")
        if height == 1:
            shown = shown.rstrip("\n").rpartition("\n")[2]
            rows = [shown if len(shown) <= room else cut + shown[len(cut) - room :]]
        else:
            tail = Text(shown[-room * height :])
            rows = [line.plain for line in tail.wrap(out.console, room)][-height:] or [""]
        style = "green" if self.ended == "stop" else ""
        first = out.text((head, "cyan"), (rows[0], style))
        return [first, *(out.text(" " * len(head), (row, style)) for row in rows[1:])]


class Lanes:
    """All branches of a call, drawn over and over in place; gone when it is left.

    first: the number of the first branch. waiting: what to say until something comes.
    """

    def __init__(
        self, out: Out, n: int, waiting: Callable[[], str] | None = None, *, first: int = 1
    ) -> None:
        self.out = out
        self.lanes = [Lane(number) for number in range(first, first + n)]
        self.waiting = waiting
        self.n_tokens = 0
        self._began: float | None = None
        # Drawn from a thread of its own: a long prompt is read without anything coming in.
        self._live = Live(
            console=out.console,
            refresh_per_second=_REDRAWS_PER_S,
            transient=True,
            get_renderable=self._drawn,
        )

    def __enter__(self) -> Lanes:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def push(self, delta: Delta) -> None:
        """Take a delta."""
        if self._began is None:
            self._began = time.monotonic()
        self.n_tokens += len(delta.token_ids)
        self.lanes[delta.branch].push(delta)

    def _drawn(self) -> Group:
        if self._began is None:
            return Group(self.out.text((self.waiting() if self.waiting else "", "dim")))
        return Group(*self._lines(self.out.console.height - 2), self._progress(self._began))

    def _progress(self, began: float) -> Text:
        ended = sum(lane.ended is not None for lane in self.lanes)
        rate = self.n_tokens / max(time.monotonic() - began, 0.1)
        facts = [counted(self.n_tokens, "token"), f"{rate:.0f} tok/s"]
        if len(self.lanes) > 1:
            facts.append(f"{ended} of {len(self.lanes)} ended")
        return self.out.text(("    " + " · ".join(facts) + " · Ctrl-C stops", "dim"))

    def _lines(self, height: int) -> Iterator[Text]:
        each = min(max(height // len(self.lanes), 1), _MAX_LINES)
        n_shown = len(self.lanes) if len(self.lanes) <= height else max(height - 1, 1)
        for lane in self.lanes[:n_shown]:
            yield from lane.lines(self.out, each)
        if n_shown < len(self.lanes):
            rest = self.lanes[n_shown:]
            ended = sum(lane.ended is not None for lane in rest)
            more = counted(len(rest), "more branch", "more branches")
            yield self.out.text((f"   … {more}, {ended} ended", "dim"))


class Printer:
    """Plain lines: the branches one after the other, each as soon as it is its turn.

    first: the number of the first branch; None for the texts alone, with BETWEEN between them.
    """

    def __init__(self, out: Out, n: int, *, first: int | None = 1) -> None:
        self.out = out
        self.lanes = [Lane(number) for number in range(first or 1, (first or 1) + n)]
        self.is_numbered = first is not None
        self._at = 0
        self._begun = False

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._end()
        # A stream that was cut off: what came of the others.
        for lane in self.lanes[self._at :]:
            if not self.is_numbered and lane.text:
                self._show(lane.text)
                self._end()

    def push(self, delta: Delta) -> None:
        """Take a delta; write it if it belongs to the branch whose turn it is."""
        self.lanes[delta.branch].push(delta)
        if delta.branch == self._at:
            self._show(delta.text)
            while self._at < len(self.lanes) and self.lanes[self._at].ended is not None:
                self._next()

    def _next(self) -> None:
        if not self._begun:
            self._show("")
        self._end()
        if self._at < len(self.lanes) and self.lanes[self._at].text:
            self._show(self.lanes[self._at].text)

    def _show(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            head = f"{BETWEEN}\n" if self._at else ""
            self.out.write(f"[{self.lanes[self._at].number}] " if self.is_numbered else head)
        self.out.write(text)

    def _end(self) -> None:
        # A text that was stopped at a line's end has ended its line.
        if not self.lanes[self._at].text.endswith("\n"):
            self.out.write("\n")
        self._at, self._begun = self._at + 1, False


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def push(self, delta: Delta) -> None:
        """Take a delta."""


def watch(watcher: LaneWatcher, deltas: Generator[Delta, None, object]) -> bool:
    """Show a stream to its end; False when Ctrl-C ended it (what was made is in the tree)."""
    try:
        # Ctrl-C may come while we draw: closing the stream keeps its branches then too.
        with watcher, closing(deltas):
            for delta in deltas:
                watcher.push(delta)
    except KeyboardInterrupt:
        return False
    return True
