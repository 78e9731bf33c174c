"""`weft undo` and `weft redo`: the changes of a loom, one after the other, back and forth."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import advice, options
from .desk import desk
from .draw import show_tree
from .failures import guarded
from .kept import Kept, Turned


@guarded
def undo(
    loom: options.Loom = None, as_json: options.Json = False, verbose: options.Verbose = 0
) -> None:
    """Take back the last change of a loom: growth, removal or edit.

    Call it again for the change before that; weft redo goes the other way.
    """
    with desk() as at:
        kept = at.open(at.chosen_to_change(loom, "undo"))
        _tell(kept, kept.undo(), "undid", "weft redo", as_json=as_json)


@guarded
def redo(
    loom: options.Loom = None, as_json: options.Json = False, verbose: options.Verbose = 0
) -> None:
    """Do again what weft undo took back last."""
    with desk() as at:
        kept = at.open(at.chosen_to_change(loom, "redo"))
        _tell(kept, kept.redo(), "did again", "weft undo", as_json=as_json)


def _tell(kept: Kept, turned: Turned, did: str, other: str, *, as_json: bool) -> None:
    numbers = kept.numbers()
    added = sorted(numbers[node.id] for node in turned.added)
    changed = sorted(numbers[node.id] for node in turned.changed)
    removed = sorted(turned.removed)
    kept.try_note()
    if as_json:
        told = {"kind": turned.kind, "loom": kept.name, "at": kept.number(kept.at)}
        write_object({**told, "added": added, "changed": changed, "removed": removed})
        return
    parts = [
        f"{counted(len(found), 'node')} {what} ({spans(found)})"
        for what, found in (("back", added), ("changed", changed), ("gone", removed))
        if found
    ]
    out = TerminalWriter.for_stream(sys.stdout)
    out.line((f"{did} {turned.kind}", "bold"), f" in {kept.name}: {', '.join(parts) or 'nothing'}")
    out.line()
    show_tree(out, kept, turned.added or turned.changed)
    advice.suggest(other.split(), ["weft", "tree"])


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers shortly: 1, 4-7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
