"""Weft: tree-structured inference with language models.

One token tree with one KV fragment a node, shared by every branch; all live branches run in one
batch.

    import weft
    lm = weft.load("tiny")
    loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
    steps = loom.grow(n=4, max_tokens=24, stop="\\n", seed=4)

Names are loaded when first used: importing weft imports no engine.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
# What `pip install` knows: "weft" is another project there.
DISTRIBUTION = "weft-lm"

__all__ = [
    "LM",
    "AsyncLM",
    "Branch",
    "BranchStore",
    "Heddle",
    "Loom",
    "SamplingParams",
    "WeftError",
    "load",
    "load_model_by_name",
    "samples",
    "search",
]

if TYPE_CHECKING:
    from . import samples, search
    from .aio import AsyncLM, load_model_by_name
    from .branch import Branch, BranchStore
    from .errors import WeftError
    from .lm import LM
    from .loading import load
    from .loom import Heddle, Loom
    from .sampling.params import SamplingParams

_HOME = {
    "AsyncLM": "aio",
    "Branch": "branch",
    "BranchStore": "branch",
    "LM": "lm",
    "Heddle": "loom",
    "Loom": "loom",
    "SamplingParams": "sampling.params",
    "WeftError": "errors",
    "load": "loading",
    "load_model_by_name": "aio",
}
_MODULES = ("samples", "search")

logging.getLogger("weft").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
