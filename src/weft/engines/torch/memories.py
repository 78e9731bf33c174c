"""Which memory a torch engine has: paged on CUDA, padded elsewhere, or as it was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ...checks import one_of
from ...errors import ConfigError, EngineUnavailable
from .layout import Layout
from .memory import KVMemory
from .padded.step import PaddedMemory

KVChoice = Literal["auto", "padded", "paged"]
_log = logging.getLogger("weft.engines.torch")

NewMemory = Callable[[Layout], KVMemory]


def new_memories(kv: KVChoice, device: torch.device) -> Sequence[NewMemory]:
    """Return what makes the memory: the first that agrees with the model is taken.

    Raises: ConfigError for what is no choice, and for "paged" where its kernels cannot run;
    EngineUnavailable where there is no Triton.
    """
    one_of("kv", kv, ("auto", "padded", "paged"))
    if kv == "padded" or (kv == "auto" and device.type != "cuda"):
        return [PaddedMemory]
    try:
        from .paged.kernel import is_interpreted
        from .paged.step import PagedMemory
    except ImportError as error:
        if kv == "auto":
            _log.info("KV is padded, for triton cannot be imported: %s", error)
            return [PaddedMemory]
        raise EngineUnavailable(
            f"kv is 'paged', and its kernels need triton, which comes with torch for CUDA: {error}",
            hint="pip install triton, or leave kv out",
        ) from error
    if device.type == "cpu" and not is_interpreted():
        raise ConfigError(
            "kv is 'paged', whose kernels run on CUDA; on a CPU they run, slowly, in Triton's"
            " interpreter alone: set TRITON_INTERPRET=1 before Python starts, or leave kv out"
        )
    return [PagedMemory] if kv == "paged" else [PagedMemory, PaddedMemory]
