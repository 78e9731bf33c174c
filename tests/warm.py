"""Objects that are equal in all test programs and are created once.

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

# The number of layers of the embedded model that run, if a test ignores its text; None: all.
LAYERS = "WEFT_TESTS_LAYERS"


def keep_weights() -> None:
    """Read the embedded model's weights only once in this process."""
    engine.read_weights = _read_once


def _read_once(checkpoint: Checkpoint, config: LlamaConfig, **options: Any) -> Weights:
    if checkpoint.folder != resolve("tiny"):
        return read_weights(checkpoint, config, **options)
    weights = embedded()
    if options.get("progress") is not None:
        for index in range(config.n_layers):
            options["progress"]("load", index + 1, config.n_layers, "")
    shown = os.environ.get(LAYERS)
    return weights if shown is None else replace(weights, layers=weights.layers[: int(shown)])


@cache
def embedded() -> Weights:
    """Return the embedded model's weights."""
    checkpoint = open_checkpoint(resolve("tiny"))
    return read_weights(checkpoint, parse_config(checkpoint.config))


def new_home(folder: Path) -> None:
    """Create a WEFT_HOME whose database has empty tables."""
    folder.mkdir()
    shutil.copy(Path(_empty().name) / "weft.db", folder / "weft.db")


@cache
def _empty() -> TemporaryDirectory[str]:
    from weft.service.store import Library

    folder = TemporaryDirectory(prefix="weft-empty-")
    Library(f"sqlite:///{folder.name}/weft.db").close()
    return folder
