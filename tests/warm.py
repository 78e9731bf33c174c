"""What every program here would make anew, and always the same, is made once.

The embedded model's weights, from its file; an empty database of looms.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.engines.checkpoint import Checkpoint, open_checkpoint
from weft.engines.hub import resolve
from weft.engines.numpy import engine
from weft.engines.numpy.config import LlamaConfig, parse_config
from weft.engines.numpy.model import Weights, read_weights

# How many of the embedded model's layers run, where what it says is of no account; None: all.
LAYERS = "WEFT_TESTS_LAYERS"


def keep_weights() -> None:
    """From now on, the embedded model's weights are read once in this process."""
    engine.read_weights = _read_once


def _read_once(checkpoint: Checkpoint, config: LlamaConfig, **options: Any) -> Weights:
    if checkpoint.folder != resolve("tiny"):
        return read_weights(checkpoint, config, **options)
    whole = embedded()
    if options.get("progress") is not None:
        for index in range(config.n_layers):
            options["progress"]("load", index + 1, config.n_layers, "")
    shown = os.environ.get(LAYERS)
    return whole if shown is None else replace(whole, layers=whole.layers[: int(shown)])


@cache
def embedded() -> Weights:
    """Return the embedded model's weights."""
    checkpoint = open_checkpoint(resolve("tiny"))
    return read_weights(checkpoint, parse_config(checkpoint.config))


def new_home(folder: Path) -> None:
    """Make a folder for the command: with a database that has its tables, and nothing in them."""
    folder.mkdir()
    shutil.copy(Path(_empty().name) / "weft.db", folder / "weft.db")


@cache
def _empty() -> TemporaryDirectory[str]:
    from weft.service.store import Library

    made = TemporaryDirectory(prefix="weft-empty-")
    Library(f"sqlite:///{made.name}/weft.db").close()
    return made
