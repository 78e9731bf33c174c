"""What is drawn while branches grow and when they have: lanes, texts, the tree, the savings."""

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
_WHOLE = 40  # nodes up to which a tree is drawn whole after each growth


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
    """Grow n branches at a node while they are watched; return them in order, and whether all came.

    watcher: makes what shows them, of a number of branches that is allowed; None takes lanes on
    a terminal, plain lines elsewhere.
    On Ctrl-C they are as far as they came. The reader then stands at the likeliest.
    """
    from .session import likeliest

    growing = session.grow(node, n, sampling, force=force)
    shown = watcher() if watcher is not None else _watcher(out, n, growing)
    done = show_stream(shown, growing.deltas)
    made = growing.made()
    if made and made[0].params is not None:
        _log.info("sampling: %s", made[0].params.summary())
    session.at = likeliest(made) or node
    return made, done


def show_growth(
    out: TerminalWriter,
    session: LoomSession,
    made: Sequence[Heddle],
    tint: Tint | None,
    *,
    is_kept: bool,
) -> None:
    """Show the texts where the tree has no room for them, the tree, and what was saved."""
    numbers = session.numbers()
    if out.is_live or tint is not None:
        show_texts(out, session, [(numbers[node.id], node) for node in made], tint)
    elif made:
        out.line()
    show_tree(out, session, made)
    out.line()
    show_cost(out, session, made, is_kept=is_kept)


def show_cost(
    out: TerminalWriter, session: LoomSession, made: Sequence[Heddle], *, is_kept: bool
) -> None:
    """Write what was computed, by which engine and sampling, and the name of the loom."""
    facts = [str(session.model_handle.stats())]
    if made and made[0].params is not None:
        facts.append(f"{session.model_handle.engine}: {made[0].params.summary()}")
    if is_kept:
        facts.append(f"kept as {session.name}")
    out.facts(" · ".join(facts))


def show_tree(out: TerminalWriter, session: LoomSession, made: Sequence[Heddle] = ()) -> None:
    """Draw the loom; of a large one the path to the new branches, and these."""
    focus: frozenset[str] = frozenset()
    if made and made[0].parent is not None and session.loom.count_children() > _WHOLE:
        focus = frozenset(node.id for node in made[0].parent.path[1:])
    out.lines(Picture(out, below_root(session), focus=focus).lines(session.loom))


def below_root(session: LoomSession) -> dict[str, int]:
    """Return the numbers to draw: the root's is always 0 and is not written."""
    numbers = dict(session.numbers())
    numbers.pop(session.loom.id, None)
    return numbers


def show_texts(
    out: TerminalWriter,
    session: LoomSession,
    branches: Sequence[tuple[int, Heddle]],
    tint: Tint | None,
) -> None:
    """Write out what does not fit into the tree's lines; equal texts once."""
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
        out.block(head, text if tint is None else _stripped(out, session, group[0][1], tint))
        out.line()


def _stripped(out: TerminalWriter, session: LoomSession, node: Heddle, tint: Tint) -> Text:
    made = color_tokens(out, session.pieces(node), node, tint.scale)
    start = len(made.plain) - len(made.plain.lstrip("\n"))
    return made[start:]


def _watcher(out: TerminalWriter, n: int, growing: GenerationStream) -> DeltaDisplay:
    if not out.is_live:
        return Printer(out, n, first=growing.first)
    return Lanes(out, n, growing.waiting, first=growing.first)
