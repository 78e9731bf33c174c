"""`weft find`: full-text search over all looms."""

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
            help='Words that a node contains, all of them; "a phrase" in quotes; prefix*.',
            show_default=False,
        ),
    ],
    loom: Annotated[
        str | None,
        typer.Option(
            "--loom",
            help="Search only this loom.",
            autocompletion=options.complete_looms,
            show_default="all looms",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number of results.")] = 20,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Search the texts of all looms; the best matches first."""
    query = " ".join(f'"{word}"' if " " in word.strip() else word for word in words)
    if not query.strip():
        raise ConfigError("the search is empty; give at least one word")
    with select_backend() as backend:
        hits = backend.find(query, None if loom is None else backend.find_or_import(loom), limit)
    if as_json:
        write_object({"words": query, "hits": [hit_object(hit) for hit in hits]})
        return
    out = TerminalWriter.for_stream(sys.stdout)
    for hit in hits:
        show_hit(out, hit)
    summary = TerminalWriter.for_stream(sys.stderr)
    if not hits:
        summary.line(f"no node contains {query}")
        return
    more = " or more: --limit shows them" if len(hits) == limit else ""
    summary.line((f"{counted(len(hits), 'node')}{more}", "dim"))
    hints.suggest(["weft", "read", str(hits[0].number), "--loom", hits[0].loom])


def show_hit(out: TerminalWriter, hit: Hit) -> None:
    """Write one result: loom, node number, and a snippet with the matches highlighted."""
    parts: list[Part] = [(f"{hit.loom} ", "cyan"), (f"{hit.number}  ", "bold")]
    last = 0
    for start, end in hit.marks:
        match = _line(hit.snippet[start:end])
        parts.append(_line(hit.snippet[last:start]))
        parts.append((match, "bold yellow") if out.has_colours else f"[{match}]")
        last = end
    out.line(*parts, _line(hit.snippet[last:]))


def _line(text: str) -> str:
    """Return a text on one line, with line breaks as spaces."""
    return text.replace("\n", " ").replace("\t", " ")


def hit_object(hit: Hit) -> dict[str, Any]:
    """Return one result as a JSON object, for `weft find --json`.

    Its "marks" are (start, end) of the matches in the snippet, in characters.
    """
    return {
        "loom": hit.loom,
        "node": hit.number,
        "id": hit.id,
        "snippet": hit.snippet,
        "marks": [list(mark) for mark in hit.marks],
    }
