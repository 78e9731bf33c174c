"""`weft import`: read looms from files of Weft and of other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, StoreError
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import has_tokens, select_backend
from .failures import handle_errors
from .hints import quoted

if TYPE_CHECKING:
    from .session import LoomSession


@handle_errors
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A loom, a chat or tree of another program, or a text file.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the new loom.", show_default="from the file's title"),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="The file's format, if it is not detected correctly.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Tokenize the texts for this model, so that it can grow them.",
            autocompletion=options.complete_models,
            show_default="a server's default model; without a server, texts are not tokenized and"
            " cannot be grown",
        ),
    ] = None,
    engine: options.Engine = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Import looms from a file of Weft or of another program."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file in it")
    if not file.exists():
        raise StoreError(f"there is no file {file}")
    with select_backend() as backend:
        result = backend.import_file(file, format=format, name=name, model=model, engine=engine)
        first = backend.summary(result.names[0])
        model_name = first.model if has_tokens(first) else None
        grow: list[list[str]] = []
        if len(result.names) == 1:
            session = backend.open(first.name)
            session.try_remember()
            grow = [_grow_command(session)] if model_name else []
    if as_json:
        write_object(
            {
                "looms": result.names,
                "model": model_name,
                "recognised_as": result.recognised_as,
                "nodes": result.n_nodes,
                "dropped": result.dropped,
            }
        )
        return
    out = TerminalWriter.for_stream(sys.stdout)
    looms = ", ".join(result.names[:8]) + (" …" if len(result.names) > 8 else "")
    counts = _counts(len(result.names), result.n_nodes)
    out.line(f"imported {counts} from {file.name} ({result.recognised_as}): {looms}")
    for dropped in result.dropped:
        out.line(("  note: ", "yellow"), dropped)
    _write_model_note(file, model_name, is_given=model is not None)
    if len(result.names) > 1:
        hints.suggest(["weft", "tree", first.name], ["weft", "ls"])
    else:
        hints.suggest(["weft", "tree"], *grow)


def _grow_command(session: LoomSession) -> list[str]:
    """Return a command that grows the node selected in the file, or else the last leaf.

    An ended node gets "…" in the place of a reply.
    """
    node = session.at if session.at is not session.loom else session.loom.leaves[-1]
    reply = ["…"] if node.terminal else []
    return ["weft", "grow", str(session.number(node)), *reply]


def _counts(n_looms: int, n_nodes: int) -> str:
    """Describe the size of an import.

    n_nodes: number of nodes, including the prompts, which are not counted, as in `weft ls`.
    """
    if n_nodes > n_looms:
        return f"{counted(n_looms, 'loom')}, {counted(n_nodes - n_looms, 'node')}"
    prompts = "a prompt" if n_looms == 1 else "prompts"
    return f"{counted(n_looms, 'loom')} ({prompts} without continuations)"


def _write_model_note(file: Path, model: str | None, *, is_given: bool) -> None:
    """Write to stderr which model can grow the imported looms.

    Args:
        file: the imported file, for a suggested command.
        model: the model of the first loom; None if its texts have no tokens.
        is_given: the user selected the model with -m.
    """
    command = " ".join(map(quoted, ["weft", "import", str(file), "-m", "MODEL"]))
    if model is None:
        note = f"the texts have no tokens and cannot be grown; {command} tokenizes them"
    elif is_given:
        note = f"tokens of the model {model}"
    else:
        note = f"tokens of the model {model}; {command} selects another"
    TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
