"""Which memory a torch engine has: padded, unless it was asked for the paged one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ...checks import one_of
from ...errors import ConfigError, EngineUnavailable
from .layout import Layout
from .memory import KVMemory
from .padded.step import PaddedMemory

KVChoice = Literal["auto", "padded", "paged"]

NewMemory = Callable[[Layout], KVMemory]


def memory_maker(kv: KVChoice, device: torch.device) -> NewMemory:
    """Return what makes the memory. "auto" is "padded" until a card has run the paged kernels.

    Raises: ConfigError for what is no choice, and for "paged" where its kernels cannot run;
    EngineUnavailable where there is no Triton.
    """
    one_of("kv", kv, ("auto", "padded", "paged"))
    if kv != "paged":
        return PaddedMemory
    try:
        from .paged.kernel import is_interpreted
        from .paged.step import PagedMemory
    except ImportError as error:
        raise EngineUnavailable(
            f"kv is 'paged', and its kernels need triton, which comes with torch for CUDA: {error}",
            hint="pip install triton, or leave kv out",
        ) from error
    if device.type == "cpu" and not is_interpreted():
        raise ConfigError(
            "kv is 'paged', whose kernels run on CUDA; on a CPU they run, slowly, in Triton's"
            " interpreter alone: set TRITON_INTERPRET=1 before Python starts, or leave kv out"
        )
    return PagedMemory
