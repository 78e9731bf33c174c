"""`weft export`: write a path, a subtree or the full tree to a file."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, EngineError, ModelMismatch, StoreError
from ..service.interchange.exporters import EXPORTERS, exporter_of, scope_of
from ..service.interchange.scope import Scope
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import open_session, open_with_model
from .failures import handle_errors
from .options import Tint, complete_nodes
from .session import LoomSession

SUFFIXES = tuple(dict.fromkeys(each.suffix for each in EXPORTERS.values()))
_TINTS = {Tint.PROB: "probability", Tint.ENTROPY: "entropy"}


@handle_errors
def export(
    path: Annotated[
        Path, typer.Argument(help=f"File to write; one of {' '.join(SUFFIXES)}.", dir_okay=True)
    ],
    scope: Annotated[
        Scope | None,
        typer.Option(
            "--scope",
            help="path: prompt to node; subtree: the node and all below it; json, text, markdown"
            " and messages also have the path to the node; tree: the full loom.",
            show_default="path for .txt and .md, unless the path is only the prompt; else tree",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            help="Last node of the path, or top of the subtree.",
            autocompletion=complete_nodes,
            show_default="the node last read or grown",
        ),
    ] = None,
    loom: options.Loom = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"Format; one of {' '.join(EXPORTERS)}.",
            show_default="by the suffix; csv for .csv, messages for .jsonl",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            help="For pairs: rank siblings by score, rating or bookmark.",
            show_default="score",
        ),
    ] = None,
    color: options.Color = None,
    top: Annotated[
        int,
        typer.Option(
            "--top", help="For .html: show this many alternatives for each token; runs the model."
        ),
    ] = 0,
    kv: Annotated[
        bool,
        typer.Option(
            "--kv", help="For .json: also write the KV cache, which is loaded with the loom."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Write a path, a subtree or the full tree to a file.

    The suffix selects the format: .txt .md .json .html .dot .mmd .csv .jsonl. Without --loom, the
    loom last used in this terminal is written.
    """
    exporter = exporter_of(format, path)
    if node is not None:
        scope = scope or exporter.default
        if scope is Scope.TREE:
            hint = "add --scope subtree"
            raise ConfigError("--node cannot be used with --scope tree", hint=hint)
    if scope is not None and scope in exporter.refused:
        raise ConfigError(f"{exporter.name}: {exporter.refused[scope]}", hint="add --scope tree")
    own = _options(exporter.name, color=color, top=top, by=by)
    if kv and exporter.name != "json":
        raise ConfigError(f"--kv is for .json, not {exporter.name}")
    check_target(path, force=force)
    with ExitStack() as stack:
        if kv:
            session = stack.enter_context(open_with_model(loom, None, "auto", "auto"))
        else:
            session = open_for_format(exporter.name, loom, stack)
        at = session.node(node)
        chosen = scope or scope_of(exporter, at)
        at = session.loom if chosen is Scope.TREE else at
        session.export(at, path, exporter.name, chosen, kv=kv, **own)
        number = session.number(at)
    if as_json:
        report = {"file": str(path), "loom": session.name, "scope": chosen.value, "node": number}
        write_object(report)
    else:
        report_written(session, chosen, path, number)


def _options(format: str, *, color: Tint | None, top: int, by: str | None) -> dict[str, Any]:
    """Return the keywords for `LoomSession.export` that belong to a format.

    The arguments are the values of --color, --top and --by.
    Raises: ConfigError for an option that this format does not have, and for a wrong --by.
    """
    if (top or color) and format != "html":
        raise ConfigError(f"--top and --color are for .html, not {format}")
    if by is not None and format != "pairs":
        raise ConfigError(f"--by is for --format pairs, not {format}")
    if format == "html":
        return {"tint": _TINTS[color or Tint.PROB], "top": top}
    if by is None:
        return {}
    from ..service.interchange.preference_pairs import ranking

    ranking(by, lambda node: None)  # raises before a loom is opened
    return {"by": by}


def report_written(session: LoomSession, scope: Scope, path: Path, number: int) -> None:
    """Print what was exported to which file, then suggest commands.

    number: the exported node's number.
    """
    part = {
        Scope.PATH: f"the path to node {number}",
        Scope.SUBTREE: f"node {number}, the path to it and all below it",
        Scope.TREE: f"the full tree, {counted(session.loom.count_children() - 1, 'node')}",
    }[scope]
    TerminalWriter.for_stream(sys.stdout).line(f"wrote {path}: {part}")
    hints.suggest(["weft", "tree"], ["weft", "ls"])


def check_target(path: Path, *, force: bool) -> None:
    """Check that a file can be written.

    Raises: ConfigError for a folder or a missing folder; StoreError if the file exists, unless
    `force` is set.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}; create it first")
    if path.exists() and not force:
        raise StoreError(f"{path} exists already", hint="--force overwrites it")


def open_for_format(format: str, loom: str | None, stack: ExitStack) -> LoomSession:
    """Open the loom to export.

    The formats "html" and "tokens" show single tokens, so the model is loaded for them. If that
    fails, the loom is opened without a model, with a note on stderr.

    Args:
        format: name of the format.
        loom: the loom; None means the loom last used in this terminal.
        stack: closes the session and the model.
    """
    if format in ("html", "tokens"):
        try:
            return stack.enter_context(open_with_model(loom, None, "auto", "auto"))
        except (EngineError, ModelMismatch) as error:
            note = f"the {format} shows no single tokens, as the model cannot be loaded: {error}"
            if format == "tokens":
                note = f"tokens have no texts, as the model cannot be loaded: {error}"
            TerminalWriter.for_stream(sys.stderr).line((note, "yellow"))
    return stack.enter_context(open_session(loom))
