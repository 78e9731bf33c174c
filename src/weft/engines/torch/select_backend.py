"""Select the KV backend of a torch engine: paged on a GPU that passes its check, else padded."""

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
    """Return factories of backends; the engine uses the first over which the model passes its
    check.

    Raises: ConfigError for an unknown `kv`, and for "paged" if its kernels cannot run;
    EngineUnavailable if Triton is missing.
    """
    check_choice("kv", kv, ("auto", "padded", "paged"))
    if kv == "padded" or (kv == "auto" and device.type == "cpu"):
        return [PaddedBackend]
    try:
        from .paged.kernel import is_interpreted
        from .paged.step import PagedBackend
    except ImportError as error:
        if kv == "auto":
            _log.warning("%s; KV is stored in padded rows, which is slower on a GPU", error)
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
            "kv is 'paged', whose kernels run on CUDA; on a CPU they only run, slowly, in Triton's"
            " interpreter: set TRITON_INTERPRET=1 before Python starts, or leave kv out"
        )
    if device.type == "cuda" and not is_for_triton(device):
        raise ConfigError(
            "kv is 'paged', whose kernels are for NVIDIA's cards of compute capability 8.0 and up,"
            " with torch for CUDA; leave kv out, or give 'padded'"
        )
    return [PagedBackend]


def with_smaller_tiles(memory: KVBackend, error: BaseException) -> KVBackend | None:
    """Return a backend with smaller tiles, if `error` reports that tiles exceed the GPU's
    resources.

    None for other errors, and if there are no smaller tiles. Compute capability 9.0 has 227 KiB of
    shared memory a program, 8.9 and 12.0 have 99.
    """
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "OutOfResources":  # Triton's
        cause = cause.__cause__
    if cause is None or isinstance(memory, PaddedBackend):
        return None
    from .paged.step import PagedBackend

    assert isinstance(memory, PagedBackend)
    smaller = memory.with_smaller_tiles()
    if smaller is not None:
        _log.info("this GPU needs smaller tiles: %s", cause)
    return smaller


def prefers_kernels(makers: Sequence[BackendFactory]) -> bool:
    """Return True if the preferred backend runs Triton kernels. makers: of `kv_backends`."""
    return makers[0] is not PaddedBackend


def has_kernels(makers: Sequence[BackendFactory], device: torch.device) -> bool:
    """Return True if the engine will compile Triton kernels: on a GPU with the paged backend."""
    return device.type == "cuda" and prefers_kernels(makers)


def check_kernels(device: torch.device, why: str) -> None:
    """Raise ModelLoadError if a failed kernel has broken CUDA in this process."""
    if device.type != "cuda":
        return
    try:
        with capturing:
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"Weft's kernels broke CUDA for this process ({why}); start it again with"
            " engine_options={'kv': 'padded'}, which runs none of them, and report this error"
        ) from error


def check_reproducible(reproducible: bool, kv: KVChoice) -> None:
    """Raise ConfigError if `reproducible` is not a bool, or is True with kv="paged"."""
    check_choice("reproducible", reproducible, (True, False))
    if reproducible and kv == "paged":
        raise ConfigError('reproducible=True needs padded KV; leave kv="paged" out')


def check_graphs(graphs: bool | None, kv: KVChoice) -> None:
    """Raise ConfigError if `graphs` is invalid, or has no effect with this `kv`."""
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
    """Return the runner of CUDA graphs for a backend; None if steps run eagerly.

    Args:
        graphs: None: capture on CUDA. True: also on a CPU, where a captured step is run again.
        weight_addresses: returns a number that changes when weights move in memory.
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
