"""`weft import`: read looms from files of Weft and of other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, StoreError
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import select_backend
from .failures import handle_errors
from .hints import quoted


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
            show_default="texts are not tokenized, and can only be read",
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
    if as_json:
        write_object(
            {
                "looms": result.names,
                "recognised_as": result.recognised_as,
                "nodes": result.n_nodes,
                "dropped": result.dropped,
            }
        )
        return
    out = TerminalWriter.for_stream(sys.stdout)
    looms = ", ".join(result.names[:8]) + (" …" if len(result.names) > 8 else "")
    below = result.n_nodes - len(result.names)  # prompts are not counted, as in `weft ls`
    counts = f"{counted(len(result.names), 'loom')}, {counted(below, 'node')}"
    out.line(f"imported {counts} from {file.name} ({result.recognised_as}): {looms}")
    for dropped in result.dropped:
        out.line(("  left out: ", "yellow"), dropped)
    first = result.names[0]
    if result.is_text:
        command = " ".join(map(quoted, ["weft", "import", str(file), "-m", "MODEL"]))
        note = f"the texts have no tokens and cannot be grown; {command} tokenizes them"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
    hints.suggest(["weft", "tree", first], ["weft", "ls"])
