"""Display of growing branches (lanes), and of the result: texts, tree and statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..viz.lanes import DeltaDisplay, Lanes, Printer, show_stream
from ..viz.terminal import TerminalWriter
from ..viz.text import Picture, color_tokens, legend
from .options import Tint

if TYPE_CHECKING:
    from ..loom import Heddle
    from .session import GenerationStream, LoomSession

_log = logging.getLogger(__name__)
_MAX_FULL_TREE = 40  # nodes; of a larger tree only the path to new branches is drawn


def grow_and_show(
    out: TerminalWriter,
    session: LoomSession,
    node: Heddle,
    n: int,
    sampling: dict[str, Any],
    watcher: Callable[[], DeltaDisplay] | None = None,
    *,
    force: bool = False,
) -> tuple[list[Heddle], bool]:
    """Generate n branches at a node and display them; then select the likeliest one.

    watcher: creates the display. None means lanes on a terminal and plain lines elsewhere.
    Returns the branches in order, and False if Ctrl-C stopped them; then they are partial.
    """
    from .session import likeliest

    stream = session.grow(node, n, sampling, force=force)
    display = watcher() if watcher is not None else _create_display(out, n, stream)
    done = show_stream(display, stream.deltas)
    branches = stream.branches()
    if branches and branches[0].params is not None:
        _log.info("sampling: %s", branches[0].params.summary())
    session.at = likeliest(branches) or node
    return branches, done


def show_growth(
    out: TerminalWriter,
    session: LoomSession,
    branches: Sequence[Heddle],
    tint: Tint | None,
    *,
    is_kept: bool,
) -> None:
    """Show long texts, then the tree, then the statistics."""
    numbers = session.numbers()
    if out.is_live or tint is not None:
        show_texts(out, session, [(numbers[node.id], node) for node in branches], tint)
    elif branches:
        out.line()
    show_tree(out, session, branches)
    out.line()
    show_cost(out, session, branches, is_kept=is_kept)


def show_cost(
    out: TerminalWriter, session: LoomSession, branches: Sequence[Heddle], *, is_kept: bool
) -> None:
    """Write statistics, the engine, the sampling parameters and the loom's name."""
    facts = [str(session.model_handle.stats())]
    if branches and branches[0].params is not None:
        facts.append(f"{session.model_handle.engine}: {branches[0].params.summary()}")
    if is_kept:
        facts.append(f"kept as {session.name}")
    out.facts(" · ".join(facts))


def show_tree(out: TerminalWriter, session: LoomSession, branches: Sequence[Heddle] = ()) -> None:
    """Draw the loom; of a large one only the path to the new branches."""
    focus: frozenset[str] = frozenset()
    if (
        branches
        and branches[0].parent is not None
        and session.loom.count_children() > _MAX_FULL_TREE
    ):
        focus = frozenset(node.id for node in branches[0].parent.path[1:])
    out.lines(Picture(out, below_root(session), focus=focus).lines(session.loom))


def below_root(session: LoomSession) -> dict[str, int]:
    """Return the numbers to draw: all but the root's, which is always 0."""
    numbers = dict(session.numbers())
    numbers.pop(session.loom.id, None)
    return numbers


def show_texts(
    out: TerminalWriter,
    session: LoomSession,
    branches: Sequence[tuple[int, Heddle]],
    tint: Tint | None,
) -> None:
    """Write the texts in full if one does not fit into its line of the tree; equal texts once."""
    same: dict[str, list[tuple[int, Heddle]]] = {}
    for number, node in branches:
        same.setdefault(node.text.strip("\n"), []).append((number, node))
    if tint is None and all("\n" not in text and len(text) < out.width - 40 for text in same):
        return
    if tint is not None:
        out.lines([legend(out, tint.scale)])
        out.line()
    for text, group in same.items():
        head = " ".join(str(number) for number, _ in group)
        out.block(head, text if tint is None else _colored(out, session, group[0][1], tint))
        out.line()


def _colored(out: TerminalWriter, session: LoomSession, node: Heddle, tint: Tint) -> Text:
    text = color_tokens(out, session.pieces(node), node, tint.scale)
    start = len(text.plain) - len(text.plain.lstrip("\n"))
    return text[start:]


def _create_display(out: TerminalWriter, n: int, stream: GenerationStream) -> DeltaDisplay:
    if not out.is_live:
        return Printer(out, n, first=stream.first)
    return Lanes(out, n, stream.status, first=stream.first)
