"""`weft undo` and `weft redo`: step through the changes of a loom."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import select_backend
from .failures import handle_errors
from .growth_display import show_tree
from .session import LoomSession, UndoResult


@handle_errors
def undo(
    loom: options.Loom = None, as_json: options.Json = False, verbose: options.Verbose = 0
) -> None:
    """Undo the last change of a loom: growth, removal or edit.

    Repeat it for earlier changes; weft redo restores them.
    """
    with select_backend() as backend:
        session = backend.open(backend.resolve_name_to_change(loom, "undo"))
        _report(session, session.undo(), "undid", "weft redo", as_json=as_json)


@handle_errors
def redo(
    loom: options.Loom = None, as_json: options.Json = False, verbose: options.Verbose = 0
) -> None:
    """Redo the change that weft undo took back last."""
    with select_backend() as backend:
        session = backend.open(backend.resolve_name_to_change(loom, "redo"))
        _report(session, session.redo(), "did again", "weft undo", as_json=as_json)


def _report(
    session: LoomSession, result: UndoResult, action: str, inverse: str, *, as_json: bool
) -> None:
    """Write what an undo or redo changed, as a line or as JSON. inverse: the verb to suggest."""
    numbers = session.numbers()
    added = sorted(numbers[node.id] for node in result.added)
    changed = sorted(numbers[node.id] for node in result.changed)
    removed = sorted(result.removed)
    session.try_remember()
    if as_json:
        report = {"kind": result.kind, "loom": session.name, "at": session.number(session.at)}
        write_object({**report, "added": added, "changed": changed, "removed": removed})
        return
    out = TerminalWriter.for_stream(sys.stdout)
    changes = {"back": added, "changed": changed, "gone": removed}
    out.line(*describe_change(action, result.kind, session.name, changes))
    out.line()
    show_tree(out, session, result.added or result.changed)
    hints.suggest(inverse.split(), ["weft", "tree"])


def describe_change(
    action: str, kind: str, loom: str, changes: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, str], str]:
    """Return a line about an undone or redone operation, as arguments of `TerminalWriter.line`.

    Args:
        action: "undid" or "did again".
        kind: kind of the operation, such as "remove".
        loom: the loom's name.
        changes: sorted node numbers by change, such as {"back": [3]}; empty ones are left out.
    """
    parts = [
        f"{counted(len(nodes), 'node')} {change} ({spans(nodes)})"
        for change, nodes in changes.items()
        if nodes
    ]
    head = (f"{action} {kind.replace('_', ' ')}", "bold")
    return head, f" in {loom}: {', '.join(parts) or 'nothing'}"


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, with runs abbreviated, such as "1, 4-7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
