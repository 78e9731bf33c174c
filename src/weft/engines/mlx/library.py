"""Imports of mlx-lm without its side effects."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def mlx_lm(module: str) -> Any:
    """Import and return a module of mlx-lm, such as "models.cache".

    NOTE: on its first import the library lowers the process's limit of open files, also in a server
    that had raised it. This function prevents that.
    """
    if "mlx_lm" not in sys.modules:
        _import_keeping_limits()
    return importlib.import_module(f"mlx_lm.{module}")


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer as `mlx_lm.load` does."""
    utils = mlx_lm("utils")
    ends = utils.load_config(folder).get("eos_token_id")
    return utils.load_tokenizer(folder, eos_token_ids=ends)


def _import_keeping_limits() -> None:
    """Import mlx_lm without its change of the limit of open files."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        importlib.import_module("mlx_lm")
        return
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None  # the hard limit could not be raised again afterwards
    try:
        importlib.import_module("mlx_lm")
    finally:
        resource.setrlimit = setrlimit
