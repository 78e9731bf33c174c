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
    """Generate n branches at a node, and display them while they grow.

    The branch with the highest mean logprob becomes the current node. Nothing is saved.

    Args:
        out: the output.
        session: the loom with its model.
        node: the node at which the branches grow.
        n: number of branches.
        sampling: the sampling parameters that were given.
        watcher: creates the display. None means lanes on a terminal and plain lines elsewhere.
        force: also grow a node that has ended.

    Returns:
        The branches in branch order, and True if they are complete. False means that Ctrl-C
        stopped them.
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
    """Write the result of a generation: long texts in full, the tree, and the statistics.

    Args:
        out: the output.
        session: the loom with its model.
        branches: the generated branches.
        tint: color tokens by this value, and write all texts in full. None for no colors.
        is_kept: the loom is saved; its name is written.
    """
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
    """Write one line: statistics, the engine, the sampling parameters and the loom's name.

    branches: the generated branches; the first one has the sampling parameters.
    is_kept: the loom is saved; only then its name is written.
    """
    facts = [str(session.model_handle.stats())]
    if branches and branches[0].params is not None:
        facts.append(f"{session.model_handle.engine}: {branches[0].params.summary()}")
    if is_kept:
        facts.append(f"saved as {session.name}")
    out.facts(" · ".join(facts))


def show_tree(out: TerminalWriter, session: LoomSession, branches: Sequence[Heddle] = ()) -> None:
    """Draw the loom as a tree.

    branches: new siblings. If the loom has more than 40 nodes, only the path to their parent and
    all nodes below it are drawn. Empty draws the full loom.
    """
    focus: frozenset[str] = frozenset()
    if (
        branches
        and branches[0].parent is not None
        and session.loom.count_children() > _MAX_FULL_TREE
    ):
        focus = frozenset(node.id for node in branches[0].parent.path[1:])
    out.lines(Picture(out, below_root(session), focus=focus).lines(session.loom))


def below_root(session: LoomSession) -> dict[str, int]:
    """Return node numbers by node id for a drawing, without the root, which is always 0."""
    numbers = dict(session.numbers())
    numbers.pop(session.loom.id, None)
    return numbers


def show_texts(
    out: TerminalWriter,
    session: LoomSession,
    branches: Sequence[tuple[int, Heddle]],
    tint: Tint | None,
) -> None:
    """Write the texts of branches in full, equal texts once.

    Nothing is written if the drawing of the tree shows all texts in full and `tint` is None.

    Args:
        out: the output.
        session: the loom.
        branches: (number, node) of each branch.
        tint: color tokens by this value; None for no colors.
    """
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
    """Return a node's text with each token in the colour of a statistic."""
    text = color_tokens(out, session.pieces(node), node, tint.scale)
    start = len(text.plain) - len(text.plain.lstrip("\n"))
    return text[start:]


def _create_display(out: TerminalWriter, n: int, stream: GenerationStream) -> DeltaDisplay:
    """Return the display of growing branches: lanes on a terminal, else lines."""
    if not out.is_live:
        return Printer(out, n, first=stream.first)
    return Lanes(out, n, stream.status, first=stream.first)
