"""`weft ls`, `weft rm`, `weft undo`, `weft redo`: what is kept, what goes and what comes back."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len

from .. import samples
from ..errors import ConfigError
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import Backend, select_backend
from .failures import handle_errors
from .options import complete_looms_and_nodes

if TYPE_CHECKING:
    from ..service.store import LoomSummary


@handle_errors
def ls(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """List the looms that are kept.

    The one changed last is first; * is the one drawn last in this terminal.
    """
    with select_backend() as backend:
        rows, last, where = backend.rows(), backend.last_loom(), backend.where()
    if as_json:
        looms = [loom_object(row) for row in rows]
        write_object({"where": where, "last": last, "looms": looms})
        return
    out = TerminalWriter.for_stream(sys.stdout)
    if not rows:
        out.line(f"no loom yet in {where}")
        hints.suggest(["weft", "run", samples.story, "-n", "4"])
        return
    width = max(cell_len(row.name) for row in rows)
    for row in rows:
        show_row(out, row, width, is_last=row.name == last)
    hints.suggest(["weft", "tree", rows[0].name], ["weft", "read"])


def show_row(out: TerminalWriter, row: LoomSummary, width: int, *, is_last: bool) -> None:
    """Write one loom's line."""
    mark = ("* " if is_last else "  ", "bold green")
    padded = row.name + " " * (width - cell_len(row.name))
    n_nodes = counted(row.n_nodes - 1, "node")
    facts = f"  {n_nodes:>10}  {age(row.changed):>8}  {row.model}  "
    room = out.width - width - 2 - cell_len(facts)
    prompt = out.fit(" ".join(row.prompt.split()), room) if room > 8 else ""
    out.line(mark, (padded, "cyan"), facts, (prompt, "dim"))


def loom_object(row: LoomSummary) -> dict[str, Any]:
    """Return one loom for --json."""
    return {
        "name": row.name,
        "id": row.id,
        "nodes": row.n_nodes,
        "model": row.model,
        "engine": row.engine,
        "prompt": row.prompt,
        "created": row.created,
        "changed": datetime.fromtimestamp(row.changed, UTC).isoformat(timespec="seconds"),
    }


def age(changed_s: float) -> str:
    """Return how long ago that was, roughly."""
    seconds = max(time.time() - changed_s, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


@handle_errors
def rm(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Looms by name, or nodes of the last tree drawn by number, with all below them.",
            autocompletion=complete_looms_and_nodes,
            show_default=False,
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Bring back what was removed last.")] = False,
    loom: options.Loom = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Remove looms or nodes; --undo brings them back."""
    if undo == bool(what):
        raise ConfigError("give what to remove, or --undo alone", hint="weft ls, weft tree")
    with select_backend() as backend:
        if undo:
            names = bring_back(backend, loom)
            _told(as_json, "restored", names)
            commands = [["weft", "tree", name] for name in names[:3]]
        else:
            told, seen = remove(backend, list(dict.fromkeys(what or ())), loom)
            _told(as_json, "removed", told)
            commands = [["weft", "rm", "--undo"], ["weft", seen]]
    if not as_json:
        hints.suggest(*commands)


def bring_back(backend: Backend, loom: str | None) -> list[str]:
    """Bring back what was removed last; return the looms' names, and say which are others now."""
    restored = backend.restore(loom)
    for before, name in restored:
        if name != before:
            note = f"{before} is another loom by now: what was removed is {name}"
            TerminalWriter.for_stream(sys.stderr).line((note, "yellow"))
    return [name for _, name in restored]


def remove(backend: Backend, wanted: list[str], loom: str | None) -> tuple[list[str], str]:
    """Remove looms or nodes; return what, in words, and the verb that shows what is left."""
    nodes = [each for each in wanted if each.isdecimal()]
    if nodes and len(nodes) < len(wanted):
        raise ConfigError("looms and nodes cannot be removed in one call; call twice")
    if loom is not None and not nodes:
        raise ConfigError("--loom says of which loom nodes are removed; no node is given")
    if nodes:
        return remove_nodes(backend, nodes, loom), "tree"
    return remove_looms(backend, wanted), "ls"


def remove_looms(backend: Backend, names: list[str]) -> list[str]:
    """Remove looms; return their names."""
    rows = [backend.row(name) for name in names]
    backend.remove([row.name for row in rows])
    return [row.name for row in rows]


def remove_nodes(backend: Backend, numbers: list[str], loom: str | None) -> list[str]:
    """Remove nodes of the loom named, or drawn last here; return what was removed, in words."""
    session = backend.open(backend.resolve_name_to_change(loom, f"rm {' '.join(numbers)}"))
    nodes = [session.node(number) for number in numbers]
    if session.loom in nodes:
        raise ConfigError(
            "node 0 is the prompt", hint=f"weft rm {session.name} removes the whole loom"
        )
    # What stands below another of them goes with it.
    tops = [node for node in nodes if not any(above in nodes for above in node.path[:-1])]
    told = []
    for node in tops:
        rest = node.count_children() - 1
        told.append(f"node {session.number(node)}" + (f" and {rest} below it" if rest else ""))
        if node in session.at.path:
            session.at = node.parent or session.loom
    session.remove(tops)
    session.note()
    return told


def _told(as_json: bool, verb: str, names: list[str]) -> None:
    if as_json:
        write_object({verb: names})
    else:
        TerminalWriter.for_stream(sys.stdout).line(f"{verb} {', '.join(names)}")
