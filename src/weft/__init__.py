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
from typing import TYPE_CHECKING

from ._core.lazy import lazy_getattr

__version__ = "0.1.0"
DISTRIBUTION = "weft-lm"  # "weft" on PyPI is another project
# The argument of `pip install` in pages and messages: the folder of a clone. Once the packages are
# on PyPI, set it to DISTRIBUTION and run `make pages`; docs/release.md has the steps.
PIP_TARGET = "."

__all__ = [
    "LM",
    "AsyncClient",
    "AsyncLM",
    "Branch",
    "BranchStore",
    "Client",
    "Heddle",
    "Loom",
    "SamplingParams",
    "WeftError",
    "load",
    "load_model_by_name",
    "rollouts",
    "samples",
    "search",
]

if TYPE_CHECKING:
    from . import rollouts, samples, search
    from ._core.sampling.params import SamplingParams
    from .asynclm import AsyncLM, load_model_by_name
    from .branch import Branch, BranchStore
    from .errors import WeftError
    from .lm.lm import LM
    from .loading import load
    from .loom import Heddle, Loom
    from .service.client import AsyncClient, Client

logging.getLogger("weft").addHandler(logging.NullHandler())

__getattr__ = lazy_getattr(
    __name__,
    {
        "": "rollouts samples search",
        "asynclm": "AsyncLM load_model_by_name",
        "branch": "Branch BranchStore",
        "service.client": "AsyncClient Client",
        "errors": "WeftError",
        "lm.lm": "LM",
        "loading": "load",
        "loom": "Heddle Loom",
        "_core.sampling.params": "SamplingParams",
    },
)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
