"""`weft import`: looms of Weft's own files, and of other programs'."""

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
            help="A .loom.json, or another program's file: the kind is found out.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="How to call it.", show_default="from the file's own title"),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="What the file is, where that is found out wrongly.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Turn texts into this model's tokens, so that it can grow them.",
            autocompletion=options.complete_models,
            show_default="texts stay texts, to be read",
        ),
    ] = None,
    engine: options.Engine = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Take looms in from a file of Weft's or of another program."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file in it")
    if not file.exists():
        raise StoreError(f"there is no file {file}")
    with select_backend() as backend:
        brought = backend.import_file(file, format=format, name=name, model=model, engine=engine)
    if as_json:
        write_object(
            {
                "looms": brought.names,
                "recognised_as": brought.recognised_as,
                "nodes": brought.n_nodes,
                "dropped": brought.dropped,
            }
        )
        return
    out = TerminalWriter.for_stream(sys.stdout)
    looms = ", ".join(brought.names[:8]) + (" …" if len(brought.names) > 8 else "")
    below = brought.n_nodes - len(brought.names)  # prompts are not counted, as in `weft ls`
    what = f"{counted(len(brought.names), 'loom')}, {counted(below, 'node')}"
    out.line(f"imported {what} from {file.name} ({brought.recognised_as}): {looms}")
    for each in brought.dropped:
        out.line(("  left out: ", "yellow"), each)
    first = brought.names[0]
    if brought.is_text:
        again = " ".join(map(quoted, ["weft", "import", str(file), "-m", "MODEL"]))
        note = f"these are texts without tokens, to be read; {again} makes them ones to grow"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
    hints.suggest(["weft", "tree", first], ["weft", "ls"])
