"""Export formats, and the calls `export` and `write`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core import atomic_files
from ...errors import ConfigError
from .scope import Scope

if TYPE_CHECKING:
    from ...loom import Heddle
    from .preference_pairs import Label
    from .selection import Selection


class Exporter(NamedTuple):
    """An export format: how to write a part of a loom to a file."""

    name: str
    suffix: str  # of files, with the dot
    media_type: str  # for HTTP
    about: str  # a description of a few words
    default: Scope  # the part to export if the caller names none
    write: Callable[..., Iterator[str]]  # yields the file's text, in pieces, for a `Selection`
    options: frozenset[str] = frozenset()  # keywords of `write`
    refused: Mapping[Scope, str] = {}  # unsupported scopes, with the reason


def loom_lines(part: Selection, *, bookmark: Label | None = None, title: str = "") -> Iterator[str]:
    """Yield the text of a `.loom.json` file, without the local path of the model's folder.

    Args:
        part: the part of the loom to write.
        bookmark: returns a node's bookmark, which is written to its meta. None: the bookmarks that
            the meta has stay.
        title: the loom's title; "" for none.
    """
    from ..store.file import chunks
    from .preference_pairs import BOOKMARK

    if bookmark is not None:
        for node in part.loom.walk():
            label = bookmark(node)
            node.meta.pop(BOOKMARK, None)
            if label is not None:
                node.meta[BOOKMARK] = label
    model = part.loom.meta.get("model")
    if isinstance(model, str) and Path(model).is_absolute():
        del part.loom.meta["model"]
    return chunks(part.loom, title=title)


def page(
    part: Selection, *, tint: str = "probability", top: int = 0, mark: Heddle | None = None
) -> Iterator[str]:
    """Yield an HTML page; see `Heddle.to_html`.

    mark: a node of the original loom, not of the copy; the path to it is highlighted.
    """
    from ...viz import to_html

    marked = None
    if mark is not None:
        marked = next((node for node in part.loom.walk() if node.id == mark.id), None)
    yield to_html(part.top, tint=tint, top=top, mark=marked, numbers=part.numbers)


def digraph(part: Selection, *, limit: int | None = None) -> Iterator[str]:
    """Yield a Graphviz digraph of the selection; see `Heddle.to_dot`."""
    from ...viz import to_dot

    yield to_dot(part.top, limit=limit)


def flowchart(part: Selection, *, limit: int | None = 150) -> Iterator[str]:
    """Yield a Mermaid flowchart of the selection; see `Heddle.to_mermaid`."""
    from ...viz import to_mermaid

    yield to_mermaid(part.top, limit=limit)


def _by(module: str, name: str) -> Callable[..., Iterator[str]]:
    """Return a wrapper of a function, which imports the function's module when it is called.

    module, name: names of the module and of the function.
    """

    def write(part: Selection, **options: Any) -> Iterator[str]:
        lines: Iterator[str] = getattr(import_module(f".{module}", __package__), name)(
            part, **options
        )
        return lines

    return write


_PATH, _TREE = Scope.PATH, Scope.TREE
_JSON, _LINES = "application/json", "application/jsonl"
_MARKS = frozenset({"bookmark"})
_NO_SIBLINGS = "a path has no siblings to compare; export a subtree or the tree"

# By name; a suffix selects the first format that has it.
EXPORTERS: Mapping[str, Exporter] = {
    each.name: each
    for each in (
        Exporter("json", ".json", _JSON, "a complete loom", _TREE, loom_lines, _MARKS | {"title"}),
        Exporter("text", ".txt", "text/plain", "the text", _PATH, _by("text_export", "text_lines")),
        Exporter(
            "markdown",
            ".md",
            "text/markdown",
            "the text, or a nested list",
            _PATH,
            _by("text_export", "markdown_file"),
            frozenset({"name"}),
        ),
        Exporter(
            "html",
            ".html",
            "text/html",
            "a page that needs nothing else",
            _TREE,
            page,
            frozenset({"tint", "top", "mark"}),
        ),
        Exporter(
            "dot",
            ".dot",
            "text/vnd.graphviz",
            "a graph for Graphviz",
            _TREE,
            digraph,
            frozenset({"limit"}),
        ),
        Exporter(
            "mermaid",
            ".mmd",
            "text/vnd.mermaid",
            "a graph for Markdown pages",
            _TREE,
            flowchart,
            frozenset({"limit"}),
        ),
        Exporter(
            "csv",
            ".csv",
            "text/csv",
            "a row a node",
            _TREE,
            _by("csv_export", "node_rows"),
            _MARKS,
        ),
        Exporter(
            "tokens",
            ".csv",
            "text/csv",
            "a row a token",
            _TREE,
            _by("csv_export", "token_rows"),
            frozenset({"ranks"}),
        ),
        Exporter(
            "messages",
            ".jsonl",
            _LINES,
            "chat messages a path",
            _TREE,
            _by("turns", "message_lines"),
        ),
        Exporter(
            "pairs",
            ".jsonl",
            _LINES,
            "preference pairs of siblings",
            _TREE,
            _by("preference_pairs", "pair_lines"),
            frozenset({"by", "bookmark"}),
            {_PATH: _NO_SIBLINGS},
        ),
    )
}


def exporter_of(format: str | None, path: str | os.PathLike[str] | None = None) -> Exporter:
    """Return an export format.

    Args:
        format: name of the format; None: the format of the file's suffix.
        path: the file; not needed with `format`.

    Raises: ConfigError for an unknown name or suffix.
    """
    suffix = "" if path is None else Path(path).suffix.lower()
    if format is None:
        for exporter in EXPORTERS.values():
            if exporter.suffix == suffix:
                return exporter
        suffixes = " ".join(dict.fromkeys(exporter.suffix for exporter in EXPORTERS.values()))
        name = "" if path is None else Path(path).name
        raise ConfigError(f"{name} ends in none of {suffixes}")
    if format not in EXPORTERS:
        raise ConfigError(f"format is {format!r}; allowed are {', '.join(EXPORTERS)}")
    return EXPORTERS[format]


def scope_of(exporter: Exporter, node: Heddle, scope: str | None = None) -> Scope:
    """Return the part of a loom to export.

    Args:
        exporter: the format.
        node: the node to export.
        scope: name of the scope. None: the format's default, or the tree if the node is a prompt
            with branches, because the path to it has no branches.

    Raises: ConfigError for an unknown name.
    """
    if scope is not None:
        return Scope.from_name(scope)
    return Scope.TREE if node.parent is None and node.children else exporter.default


def export(
    node: Heddle,
    format: str,
    *,
    scope: str | None = None,
    numbers: Mapping[str, int] | None = None,
    **options: Any,
) -> Iterator[str]:
    """Return a part of a node's loom in a format, as pieces of text. Changes nothing.

    The part is copied before this call returns, so the loom may grow while it is written.

    Args:
        node: the end of the path, or the top of the subtree.
        format: a key of `EXPORTERS`.
        scope: "path", "subtree" or "tree", see `Scope`. Drawings and tables of a subtree leave out
            the path. None: the format's default, see `EXPORTERS`; the tree for a prompt with
            branches.
        numbers: node numbers by id; children are ordered by them.
        options: keywords of the format. markdown: `name`. html: `tint`, `top`, `mark`. dot,
            mermaid: `limit`. tokens: `ranks`. pairs: `by`. json, csv, pairs: `bookmark`.

    Returns: an iterator of text.

    Raises: ConfigError for an unknown format, a scope or an option that the format does not
    support.

    Cost: O(nodes of the loom).
    """
    exporter = exporter_of(format)
    for name in options:
        if name not in exporter.options:
            allowed = ", ".join(sorted(exporter.options)) or "none"
            raise ConfigError(f"{format} has no option {name!r}; allowed are {allowed}")
    chosen = scope_of(exporter, node, scope)
    if chosen in exporter.refused:
        raise ConfigError(f"{format} of a {chosen}: {exporter.refused[chosen]}")
    from .selection import select

    return exporter.write(select(node, chosen, numbers), **options)


def write(
    node: Heddle,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    scope: str | None = None,
    numbers: Mapping[str, int] | None = None,
    kv: bool = False,
    **options: Any,
) -> None:
    """Write the output of `export` to a file, atomically.

    Args:
        path: the file to write.
        format: a key of `EXPORTERS`; None: by the file's suffix.
        kv: with json, write the KV to a second file, as `Loom.save` does.
        scope, numbers, options: as for `export`.

    Raises: as `export`; StoreError if the file cannot be written. Unsupported for `kv` on an engine
    whose KV cannot be stored; the loom is written.
    """
    exporter = exporter_of(format, path)
    if kv and exporter.name != "json":
        raise ConfigError(f"kv needs the json format, which can be opened; not {exporter.name}")
    pieces = export(node, exporter.name, scope=scope, numbers=numbers, **options)
    atomic_files.write(path, pieces)
    if kv:
        from ..store import sidecar

        chosen = scope_of(exporter, node, scope)
        top = node.path[0] if chosen is Scope.TREE else node
        sidecar.save(top, sidecar.path_for(path), below=chosen is not Scope.PATH)
