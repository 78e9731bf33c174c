"""`weft ls` and `weft rm`: the looms that are kept, and what is taken away of them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len

from .. import samples
from ..errors import ConfigError, StoreError, WeftError
from ..viz.out import Out, write_object
from ..viz.outline import counted
from . import advice, options
from .failures import guarded
from .kept import Kept, chosen
from .options import complete_looms_and_nodes
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
        looms = [loom_object(shelf, name, summary) for name, summary in found]
        write_object({"home": str(shelf.folder), "last": last, "looms": looms})
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


def loom_object(shelf: Shelf, name: str, summary: Summary | None) -> dict[str, Any]:
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


@guarded
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
    """Remove looms or nodes; --undo brings them back.

    What was removed last is kept until the next time.
    """
    shelf = Shelf()
    if undo == bool(what):
        raise ConfigError("give what to remove, or --undo alone", hint="weft ls, weft tree")
    if undo:
        names = bring_back(shelf)
        _told(as_json, "restored", names)
        if not as_json:
            advice.suggest(*(["weft", "tree", name] for name in names[:3]))
        return
    wanted = list(dict.fromkeys(what or ()))
    nodes = [each for each in wanted if each.isdecimal()]
    if nodes and len(nodes) < len(wanted):
        raise ConfigError("looms and nodes cannot be removed in one call; call twice")
    if loom is not None and not nodes:
        raise ConfigError("--loom says of which loom nodes are removed; no node is given")
    with shelf.locked():
        told = remove_nodes(shelf, nodes, loom) if nodes else remove_looms(shelf, wanted)
    _told(as_json, "removed", told)
    if not as_json:
        advice.suggest(["weft", "rm", "--undo"], ["weft", "tree"] if nodes else ["weft", "ls"])


def bring_back(shelf: Shelf) -> list[str]:
    """Bring back what was removed last, each loom under its own name; return the names.

    Nodes go back into their loom, whatever was grown there since. Where another loom has the name
    by now, the old one gets another, and it is said.
    """
    names = []
    with shelf.locked():
        for name, file in shelf.removed():
            if name in shelf.names() and put_back(shelf, name, file):
                file.unlink(missing_ok=True)
                names.append(name)
                continue
            names.append(shelf.restore(name))
            if names[-1] != name:
                note = f"{name} is another loom by now: what was removed is {names[-1]}"
                Out.of(sys.stderr).line((note, "yellow"))
    if not names:
        raise StoreError("there is nothing to bring back", hint="weft ls")
    return names


def put_back(shelf: Shelf, name: str, file: Path) -> bool:
    """Put the nodes back that a loom had in `file`; False where it is not that loom any more."""
    from ..loom import Loom
    from .spoken import Spoken

    try:
        kept, before = Kept.open(shelf, name), Loom.open(file, heddle_class=Spoken)
    except StoreError:
        return False
    if kept.loom.id != before.id:
        return False
    here = {node.id: node for node in kept.loom.walk()}
    for above in list(before.walk()):
        if (now := here.get(above.id)) is None:
            continue
        order = {child.id: place for place, child in enumerate(above.children)}
        for child in list(above.children):
            if child.id not in here:
                now.add_child(child)
        # Where they stood; what has come since stands last.
        now.children.sort(key=lambda child: order.get(child.id, len(order)))
    kept.save()
    return True


def remove_looms(shelf: Shelf, names: list[str]) -> list[str]:
    """Remove looms; return their names."""
    for name in names:
        if name not in shelf.names():
            raise shelf.unknown(name)
    shelf.forget_removed()
    for name in names:
        shelf.remove(name)
    return names


def remove_nodes(shelf: Shelf, numbers: list[str], loom: str | None) -> list[str]:
    """Remove nodes of the loom named, or drawn last here; return what was removed, in words."""
    if loom is None and shelf.own() is None:
        # A number is that of a tree that was seen here.
        last = shelf.anybodys()
        raise ConfigError(
            "no loom was drawn in this terminal, so it is not clear whose nodes are meant",
            hint=f"weft rm {' '.join(numbers)} --loom {last}, or weft tree {last} first",
        )
    kept = Kept.open(shelf, chosen(shelf, loom))
    nodes = [kept.node(number) for number in numbers]
    if kept.loom in nodes:
        raise ConfigError(
            "node 0 is the prompt", hint=f"weft rm {kept.name} removes the whole loom"
        )
    shelf.forget_removed()
    shelf.remember(kept.name)
    told = []
    for number, node in zip(numbers, nodes, strict=True):
        if node.path[0] is not kept.loom:
            continue  # went with a node above it
        rest = node.count_children() - 1
        told.append(f"node {number}" + (f" and {rest} below it" if rest else ""))
        if kept.at in list(node.walk()):
            kept.at = node.parent or kept.loom
        node.remove()
    kept.save()
    return told


def _told(as_json: bool, verb: str, names: list[str]) -> None:
    if as_json:
        write_object({verb: names})
    else:
        Out.of(sys.stdout).line(f"{verb} {', '.join(names)}")
