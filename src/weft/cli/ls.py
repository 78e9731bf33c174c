"""`weft ls`: the looms that are kept."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.cells import cell_len

from .. import samples
from ..errors import WeftError
from . import advice, objects, options
from .failures import guarded
from .out import Out, counted
from .shelf import Shelf, Summary


@guarded
def ls(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """List the looms that are kept.

    The one changed last is first; * is the one drawn last in this terminal.
    """
    shelf = Shelf()
    names, last = shelf.names(), shelf.own()
    found: list[tuple[str, Summary | None]] = [(name, _summary(shelf, name)) for name in names]
    if as_json:
        looms = [as_object(shelf, name, summary) for name, summary in found]
        objects.write({"home": str(shelf.folder), "last": last, "looms": looms})
        return
    out = Out.of(sys.stdout)
    if not names:
        out.line(f"no loom yet in {shelf.looms}")
        advice.suggest(["weft", "run", samples.story, "-n", "4"])
        return
    width = max(cell_len(name) for name in names)
    for name, summary in found:
        show_row(out, name, summary, width, is_last=name == last)
    advice.suggest(["weft", "tree", names[0]], ["weft", "read"])


def show_row(out: Out, name: str, summary: Summary | None, width: int, *, is_last: bool) -> None:
    """Write one loom's line."""
    mark = ("* " if is_last else "  ", "bold green")
    padded = name + " " * (width - cell_len(name))
    if summary is None:
        out.line(mark, (padded, "cyan"), ("  broken; weft rm takes it away", "red"))
        return
    n_nodes = counted(summary.n_nodes - 1, "node")
    facts = f"  {n_nodes:>10}  {age(summary.changed_s):>8}  {summary.model}  "
    room = out.width - width - 2 - cell_len(facts)
    prompt = out.fit(" ".join(summary.prompt.split()), room) if room > 8 else ""
    out.line(mark, (padded, "cyan"), facts, (prompt, "dim"))


def as_object(shelf: Shelf, name: str, summary: Summary | None) -> dict[str, Any]:
    """Return one loom for --json; a broken one has its name and file only."""
    told: dict[str, Any] = {"name": name, "file": str(shelf.path(name)), "broken": summary is None}
    if summary is not None:
        told |= {
            "nodes": summary.n_nodes,
            "model": summary.model,
            "prompt": summary.prompt,
            "created": summary.created,
            "changed": summary.changed_s,
        }
    return told


def age(changed_s: float) -> str:
    """Return how long ago that was, roughly."""
    seconds = max(time.time() - changed_s, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


def _summary(shelf: Shelf, name: str) -> Summary | None:
    try:
        return shelf.summary(name)
    except WeftError:
        return None
