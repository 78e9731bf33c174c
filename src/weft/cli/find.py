"""`weft find`: the nodes, of all looms, that have some words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ..viz.outline import counted
from ..viz.terminal import Part, TerminalWriter, write_object
from . import hints, options
from .backend import select_backend
from .failures import handle_errors

if TYPE_CHECKING:
    from ..service.store import Hit


@handle_errors
def find(
    words: Annotated[
        list[str],
        typer.Argument(
            help='Words that a node has, all of them; "in quotes" side by side; begin* is enough.',
            show_default=False,
        ),
    ],
    loom: Annotated[
        str | None,
        typer.Option(
            "--loom",
            help="Look in this loom only.",
            autocompletion=options.complete_looms,
            show_default="all looms",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Show so many at most.")] = 20,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Find words in the texts of all looms, the best places first."""
    asked = " ".join(f'"{word}"' if " " in word.strip() else word for word in words)
    if not asked.strip():
        raise ConfigError("there is nothing to find: give some words")
    with select_backend() as backend:
        hits = backend.find(asked, None if loom is None else backend.find_or_import(loom), limit)
    if as_json:
        write_object({"words": asked, "hits": [hit_object(hit) for hit in hits]})
        return
    out = TerminalWriter.for_stream(sys.stdout)
    for hit in hits:
        show_hit(out, hit)
    about = TerminalWriter.for_stream(sys.stderr)
    if not hits:
        about.line(f"no node has {asked}")
        return
    more = " or more: --limit shows them" if len(hits) == limit else ""
    about.line((f"{counted(len(hits), 'node')}{more}", "dim"))
    hints.suggest(["weft", "read", str(hits[0].number), "--loom", hits[0].loom])


def show_hit(out: TerminalWriter, hit: Hit) -> None:
    """Write where a node is, and its text with what was found marked."""
    parts: list[Part] = [(f"{hit.loom} ", "cyan"), (f"{hit.number}  ", "bold")]
    at = 0
    for start, end in hit.marks:
        found = hit.snippet[start:end]
        parts.append(_line(hit.snippet[at:start]))
        parts.append((_line(found), "bold yellow") if out.has_colours else f"[{_line(found)}]")
        at = end
    out.line(*parts, _line(hit.snippet[at:]))


def _line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ")


def hit_object(hit: Hit) -> dict[str, Any]:
    """Return one hit for --json. marks: where the words stand in the snippet, in characters."""
    return {
        "loom": hit.loom,
        "node": hit.number,
        "id": hit.id,
        "snippet": hit.snippet,
        "marks": [list(mark) for mark in hit.marks],
    }
