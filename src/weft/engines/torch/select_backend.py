"""Which memory a torch engine has: on a card the paged one, if it passes there; else the padded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ..._core.validation import check_choice
from ...errors import ConfigError, EngineUnavailable, ModelLoadError
from .attention_hook import ForwardContext
from .cuda import is_for_triton
from .kv_backend import KVBackend
from .layout import Layout
from .padded.step import PaddedBackend
from .paged.capture import capturing

if TYPE_CHECKING:
    from .paged.cuda_graph import CudaGraphRunner

_log = logging.getLogger("weft.engines.torch")

KVChoice = Literal["auto", "padded", "paged"]

BackendFactory = Callable[[Layout], KVBackend]


def kv_backends(kv: KVChoice, device: torch.device) -> list[BackendFactory]:
    """Return what makes the memory; of several the first over which the model passes its check.

    Raises: ConfigError for what is no choice, and for "paged" where its kernels cannot run;
    EngineUnavailable where there is no Triton.
    """
    check_choice("kv", kv, ("auto", "padded", "paged"))
    if kv == "padded" or (kv == "auto" and device.type == "cpu"):
        return [PaddedBackend]
    try:
        from .paged.kernel import is_interpreted
        from .paged.step import PagedBackend
    except ImportError as error:
        if kv == "auto":
            _log.warning("%s; KV lies in padded rows, which is slower on a GPU", error)
            return [PaddedBackend]
        raise EngineUnavailable(
            f"kv is 'paged', and its kernels need triton, which comes with torch for CUDA: {error}",
            hint="pip install triton, or leave kv out",
        ) from error
    if kv == "auto":
        is_for_it = is_for_triton(device) and not is_interpreted()
        return [PagedBackend, PaddedBackend] if is_for_it else [PaddedBackend]
    if device.type == "cpu" and not is_interpreted():
        raise ConfigError(
            "kv is 'paged', whose kernels run on CUDA; on a CPU they run, slowly, in Triton's"
            " interpreter alone: set TRITON_INTERPRET=1 before Python starts, or leave kv out"
        )
    if device.type == "cuda" and not is_for_triton(device):
        raise ConfigError(
            "kv is 'paged', whose kernels are for NVIDIA's cards of compute capability 8.0 and up,"
            " with torch for CUDA; leave kv out, or give 'padded'"
        )
    return [PagedBackend]


def with_smaller_tiles(memory: KVBackend, error: BaseException) -> KVBackend | None:
    """Return a memory like one whose tiles do not fit a processor of this card, as `error` tells.

    None for any other error, and where there are no smaller tiles. Cards of one generation differ:
    a program of sm_90 has 227 KiB of shared memory, one of sm_89 or sm_120 99.
    """
    found: BaseException | None = error
    while found is not None and type(found).__name__ != "OutOfResources":  # Triton's
        found = found.__cause__
    if found is None or isinstance(memory, PaddedBackend):
        return None
    from .paged.step import PagedBackend

    assert isinstance(memory, PagedBackend)
    smaller = memory.with_smaller_tiles()
    if smaller is not None:
        _log.info("smaller tiles are tried on this card: %s", found)
    return smaller


def prefers_kernels(makers: Sequence[BackendFactory]) -> bool:
    """Whether a memory of kernels will be tried."""
    return makers[0] is not PaddedBackend


def has_kernels(makers: Sequence[BackendFactory], device: torch.device) -> bool:
    """Whether kernels will be tried that are compiled for this very device."""
    return device.type == "cuda" and prefers_kernels(makers)


def check_kernels(device: torch.device, why: str) -> None:
    """Raise ModelLoadError where a card does nothing any more, after a kernel has failed on it."""
    if device.type != "cuda":
        return
    try:
        with capturing:
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"Weft's kernels broke CUDA for this process ({why}); start it anew with"
            " engine_options={'kv': 'padded'}, which runs none of them, and tell us of it"
        ) from error


def check_reproducible(reproducible: bool, kv: KVChoice) -> None:
    """Raise ConfigError for a value that is no bool, or with KV that is not padded."""
    check_choice("reproducible", reproducible, (True, False))
    if reproducible and kv == "paged":
        raise ConfigError('reproducible=True needs padded KV; leave kv="paged" out')


def check_graphs(graphs: bool | None, kv: KVChoice) -> None:
    """Raise ConfigError for graphs that are no choice, or asked for over another memory."""
    check_choice("graphs", graphs, (None, True, False))
    if graphs and kv != "paged":
        raise ConfigError(f"graphs has no effect with kv={kv!r}; give kv='paged', or leave it out")


def step_graphs(
    graphs: bool | None,
    memory: KVBackend,
    call: ForwardContext,
    device: torch.device,
    weight_addresses: Callable[[], int],
) -> CudaGraphRunner | None:
    """Return what captures the steps over a memory; None where they are run as they are.

    graphs: None captures on CUDA; True anywhere: on a CPU what would be captured is run again.
    weight_addresses: another number once weights lie elsewhere.
    """
    if isinstance(memory, PaddedBackend) or graphs is False:
        return None
    from .paged.capture import GraphRecorder, replay_without_graph
    from .paged.cuda_graph import CudaGraphRunner
    from .paged.step import PagedBackend

    assert isinstance(memory, PagedBackend)
    if device.type == "cuda":
        return CudaGraphRunner(call, memory, GraphRecorder(device), weight_addresses)
    return CudaGraphRunner(call, memory, replay_without_graph, weight_addresses) if graphs else None
