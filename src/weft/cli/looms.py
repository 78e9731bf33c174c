"""`weft ls` and `weft rm`: list, remove and restore looms."""

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
from ..viz.terminal import Part, TerminalWriter, write_object
from . import hints, options
from .backend import Backend, select_backend
from .failures import handle_errors
from .options import complete_looms_and_nodes
from .undo import describe_change

if TYPE_CHECKING:
    from ..service.store import LoomSummary


@handle_errors
def ls(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """List the saved looms.

    The loom changed last is first; * marks the loom last used in this terminal.
    """
    with select_backend() as backend:
        rows, last, where = backend.summaries(), backend.last_loom(), backend.where()
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
    """Write the line of one loom in `weft ls`.

    Args:
        out: the output.
        row: the loom.
        width: columns of the longest name.
        is_last: mark the loom with *, as the one last used in this terminal.
    """
    mark = ("* " if is_last else "  ", "bold green")
    padded = row.name + " " * (width - cell_len(row.name))
    n_nodes = counted(row.n_nodes - 1, "node")
    facts = f"  {n_nodes:>10}  {age(row.changed):>8}  {row.model}  "
    room = out.width - width - 2 - cell_len(facts)
    title = "" if row.title == row.name else row.title
    text = out.fit(title or " ".join(row.prompt.split()), room) if room > 8 else ""
    out.line(mark, (padded, "cyan"), facts, (text, "dim"))


def loom_object(row: LoomSummary) -> dict[str, Any]:
    """Return one loom as a JSON object, for `weft ls --json`."""
    return {
        "name": row.name,
        "title": row.title,
        "id": row.id,
        "nodes": row.n_nodes,
        "model": row.model,
        "engine": row.engine,
        "prompt": row.prompt,
        "created": row.created,
        "changed": datetime.fromtimestamp(row.changed, UTC).isoformat(timespec="seconds"),
    }


def age(changed_s: float) -> str:
    """Return the time since a change, rounded, such as "3 h".

    changed_s: time of the change in seconds since the epoch.
    """
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
            help="Loom names, or node numbers; nodes are removed with all nodes below them.",
            autocompletion=complete_looms_and_nodes,
            show_default=False,
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Restore what was removed last.")] = False,
    loom: options.Loom = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Remove looms or nodes; --undo restores them."""
    if undo == bool(what):
        raise ConfigError(
            "give looms or nodes to remove, or only --undo", hint="weft ls, weft tree"
        )
    with select_backend() as backend:
        if undo:
            names, line = restore(backend, loom)
            _report(as_json, "restored", names, line)
            commands = [["weft", "tree", name] for name in names[:3]]
        else:
            removed, verb = remove(backend, list(dict.fromkeys(what or ())), loom)
            _report(as_json, "removed", removed, (f"removed {', '.join(removed)}",))
            commands = [["weft", "rm", "--undo"], ["weft", verb]]
    if not as_json:
        hints.suggest(*commands)


def restore(backend: Backend, loom: str | None) -> tuple[list[str], tuple[Part, ...]]:
    """Restore what was removed last.

    If a loom gets another name than before, a note on stderr says so.

    loom: restore nodes of this loom; None restores the last removal.

    Returns:
        The names of the looms, and the parts of a line that describes what was restored.
    """
    open_name = loom if loom is not None else backend.last_loom()
    if open_name not in {row.name for row in backend.summaries()}:
        open_name = None
    before = set[int]() if open_name is None else set(backend.open(open_name).numbers().values())
    restored = backend.restore(loom)
    if open_name is not None and restored == [(open_name, open_name)]:
        numbers = sorted(set(backend.open(open_name).numbers().values()) - before)
        return [open_name], describe_change("undid", "remove", open_name, {"back": numbers})
    for previous, name in restored:
        if name != previous:
            note = f"another loom is named {previous} now; the restored loom is {name}"
            TerminalWriter.for_stream(sys.stderr).line((note, "yellow"))
    names = [name for _, name in restored]
    return names, (f"restored {', '.join(names)}",)


def remove(backend: Backend, targets: list[str], loom: str | None) -> tuple[list[str], str]:
    """Remove looms or nodes.

    Args:
        backend: the store of looms.
        targets: names of looms, or numbers of nodes.
        loom: the loom of the nodes; None means the loom last used in this terminal.

    Returns:
        Descriptions of what was removed, and the verb that shows what is left.
    """
    nodes = [target for target in targets if target.isdecimal()]
    if nodes and len(nodes) < len(targets):
        raise ConfigError("looms and nodes cannot be removed in one call; use two calls")
    if loom is not None and not nodes:
        raise ConfigError("--loom selects the loom of nodes to remove, but no node is given")
    if nodes:
        return remove_nodes(backend, nodes, loom), "tree"
    return remove_looms(backend, targets), "ls"


def remove_looms(backend: Backend, names: list[str]) -> list[str]:
    """Remove looms, and return their names."""
    rows = [backend.summary(name) for name in names]
    backend.remove([row.name for row in rows])
    return [row.name for row in rows]


def remove_nodes(backend: Backend, numbers: list[str], loom: str | None) -> list[str]:
    """Remove nodes with all nodes below them, and return descriptions of them.

    Args:
        backend: the store of looms.
        numbers: numbers of the nodes.
        loom: the loom; None means the loom last used in this terminal.
    """
    session = backend.open(backend.resolve_name_to_change(loom, f"rm {' '.join(numbers)}"))
    nodes = [session.node(number) for number in numbers]
    if session.loom in nodes:
        raise ConfigError(
            "node 0 is the prompt", hint=f"weft rm {session.name} removes the full loom"
        )
    # Nodes below another given node are removed with it.
    tops = [node for node in nodes if not any(above in nodes for above in node.path[:-1])]
    removed = []
    for node in tops:
        rest = node.count_children() - 1
        removed.append(f"node {session.number(node)}" + (f" and {rest} below it" if rest else ""))
        if node in session.at.path:
            session.at = node.parent or session.loom
    session.remove(tops)
    session.remember()
    return removed


def _report(as_json: bool, verb: str, names: list[str], line: tuple[Part, ...]) -> None:
    """Write what was removed or restored: the line, or the names as JSON.

    verb: "removed" or "restored", the key in the JSON object.
    """
    if as_json:
        write_object({verb: names})
    else:
        TerminalWriter.for_stream(sys.stdout).line(*line)
