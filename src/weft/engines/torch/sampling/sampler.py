"""Sample tokens with Triton kernels on a GPU, and with the reference sampler on the host elsewhere.

The kernels follow the same rule as `sampling.sampler.BatchSampler`, with the same ids. The host
waits for nothing until it reads the result.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...._core.sampling.sampler import DrawResult
from ....errors import ForwardError, WeftError, is_out_of_memory
from ...base import HostDraws
from ..cuda import is_for_triton
from ..execution import on_engine_stream
from . import filters
from .cpu_reductions import MANY_LOGITS, TorchReductions
from .sampling_tensors import KNOWN_FILTERS, RowIndex, SamplingTensors

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from ...._core.sampling.sampler import BatchSampler, DrawBatch
    from ..threads import CpuThreads

_log = logging.getLogger("weft.engines.torch")

# Maximum number of logits that are sampled together. The kernels need 4 bytes a logit, and only for
# edited logits. Typical sampling ranks rows with PyTorch operations, which need some 100 bytes.
_BLOCK, _TYPICAL_BLOCK = 1 << 27, 1 << 25


class TorchDraws:
    """Tokens sampled on a device, and the copy of their log-probabilities to the host.

    ids: int64 [B], on the device; NOTHING or BROKEN if there is no token.
    """

    __slots__ = ("_arrived", "_has_kept", "_host", "_result", "ids")

    def __init__(
        self, packed: Tensor, copy_stream: torch.cuda.Stream | None = None, *, kept: bool = False
    ) -> None:
        """Start the copy to the host.

        Args:
            packed: int64 [n, B]: ids, then the float32 bits of logprobs, entropies, `kept` (if
                True) and legal_logmass (with constraints).
            copy_stream: CUDA stream of the copy; None on a CPU.
        """
        self.ids = packed[0]
        self._has_kept = kept
        self._result: DrawResult | None = None
        self._arrived: torch.cuda.Event | None = None
        if copy_stream is not None:
            self._host = torch.empty(packed.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            copy_stream.wait_stream(torch.cuda.current_stream(packed.device))
            with torch.cuda.stream(copy_stream):
                self._host.copy_(packed, non_blocking=True)
            packed.record_stream(copy_stream)  # the caller may free it before the copy ends
            self._arrived = copy_stream.record_event()
        else:
            self._host = packed

    def result(self) -> DrawResult:
        """Wait for the copy and return it. Any thread may call this, repeatedly.

        Raises: ForwardError if the device failed.
        """
        if self._result is None:
            if self._arrived is not None:
                try:
                    self._arrived.synchronize()
                except RuntimeError as error:
                    raise ForwardError(f"the device failed in a step: {error}") from error
            host = self._host.numpy()
            floats = host[1:].astype(np.int32).view(np.float32)
            more = list(floats[2:])
            kept = more.pop(0) if self._has_kept else None
            legal = more.pop(0) if more else None
            self._result = DrawResult(host[0].copy(), floats[0], floats[1], kept, legal)
        return self._result


class TorchSampler:
    """Samples for chains on one device, and caches the tensors of each chain while it exists.

    Belongs to the thread that runs steps. A steady step of a chain without penalties and
    constraints copies nothing to the device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        kernels: bool | None = None,
        threads: CpuThreads | None = None,
    ) -> None:
        """Args:
        kernels: use Triton kernels; None: if the GPU and its Triton support them.
        threads: thread counts of sampling on the host; None: PyTorch's.
        """
        self.device = device
        self._threads = threads
        self._copy_stream: torch.cuda.Stream | None = None
        has_kernels = is_for_triton(device) if kernels is None else kernels
        self._kernels = _import_kernels() if has_kernels else None
        self._run_filters: set[frozenset[str]] = set()  # each set compiles its own kernels
        self._reductions = TorchReductions()
        self._cache: WeakKeyDictionary[BatchSampler, _SamplerTensors] = WeakKeyDictionary()

    @property
    def on_device(self) -> bool:
        """True while tokens are sampled by kernels."""
        return self._kernels is not None

    def supports(self, batch: DrawBatch) -> bool:
        """Return True if the kernels know all filters of a batch."""
        return self.on_device and batch.sampler.active_filters <= KNOWN_FILTERS

    def fall_back(self, why: str) -> None:
        """Sample on the host from now on, and log the reason."""
        self._kernels = None
        self._cache.clear()
        _log.warning("tokens are sampled on the host, which is slower: %s", why)

    def on_host(self, logits: NDArray[np.float32], batch: DrawBatch) -> HostDraws:
        """Sample with the reference sampler, and with PyTorch's reductions over many logits.

        logits: float32 [R, V].
        """
        n_logits = len(batch.rows) * logits.shape[1]
        if n_logits < MANY_LOGITS:
            return HostDraws(batch.on_host(logits))
        with nullcontext() if self._threads is None else self._threads.limited(n_logits, "draw"):
            return HostDraws(batch.on_host(logits, self._reductions))

    @torch.inference_mode()
    def draw(self, logits: Tensor, batch: DrawBatch) -> TorchDraws | HostDraws:
        """Sample on the device without waiting; the host's arrays may change after the return.

        Kernels that cannot be compiled here are replaced by `on_host`. logits: [R, V], raw, of any
        float dtype.

        Raises: ConfigError for a biased or counted token outside of the vocabulary.
        """
        names = batch.sampler.active_filters
        try:
            packed = self.packed(logits, batch)
        except Exception as error:
            # Triton compiles at the first use, and the machine may lack a C compiler.
            is_other = isinstance(error, WeftError) or is_out_of_memory(error)
            if is_other or names in self._run_filters:
                raise
            self.fall_back(f"{type(error).__name__}: {error}".partition("\n")[0])
            return self.on_host(logits.float().cpu().numpy(), batch)
        self._run_filters.add(names)
        if self._copy_stream is None and packed.is_cuda:
            self._copy_stream = torch.cuda.Stream(packed.device)
        return TorchDraws(packed, self._copy_stream, kept=batch.kept)

    @torch.inference_mode()
    def packed(self, logits: Tensor, batch: DrawBatch) -> Tensor:
        """Sample as `draw` does and leave the result on the device; see `TorchDraws`."""
        with on_engine_stream(self.device):
            tensors = self._tensors_of(batch.sampler, logits.shape[1])
            tensors.update(batch)
            results = [
                self._sample_block(logits, block, rows, kept=batch.kept)
                for block, rows in zip(tensors.blocks, tensors.rows, strict=True)
            ]
            if len(results) > 1:
                return torch.cat(results, dim=1)
        if not results:
            shape = (4 if batch.kept else 3, 0)
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        return results[0]

    def _tensors_of(self, chain: BatchSampler, n_vocab: int) -> _SamplerTensors:
        """Return the cached tensors of a chain's parameters; create them at the first use."""
        tensors = self._cache.get(chain)
        if tensors is None:
            block = _TYPICAL_BLOCK if "typical_p" in chain.active_filters else _BLOCK
            tensors = self._cache[chain] = _SamplerTensors(chain, n_vocab, self.device, block)
        return tensors

    def _sample_block(
        self, logits: Tensor, tensors: SamplingTensors, rows: RowIndex, *, kept: bool
    ) -> Tensor:
        """Sample for a block of samplers; return the packed result: int64 [n, B].

        tensors: parameters of the block. rows: the logits rows that they read. kept: as for
        `draw_tokens`.
        """
        assert self._kernels is not None
        args = self._kernels.SampleArgs.from_tensors(logits, rows, tensors)
        result: Tensor = self._kernels.draw_tokens(args, kept=kept)
        if tensors.allowed is None:
            return result
        legal = filters.legal_logmass(rows.of(logits), tensors)
        return torch.cat((result, legal.view(torch.int32).long()[None]))


def _import_kernels() -> ModuleType | None:
    """Return the module of Triton kernels; None if Triton is not installed."""
    try:
        from . import kernel
    except ImportError:  # no Triton
        return None
    return kernel


class _SamplerTensors:
    """The tensors of a chain, block by block, and which host arrays they hold already."""

    def __init__(self, chain: BatchSampler, n_vocab: int, device: torch.device, block: int) -> None:
        """block: maximum number of logits of a block."""
        self._device = device
        self._n_vocab = n_vocab
        step = max(1, block // n_vocab)
        # Hold the samplers, not the chain, so that the cache does not keep the chain alive.
        self._samplers = [
            chain.samplers[first : first + step] for first in range(0, len(chain.samplers), step)
        ]
        self.blocks = [
            SamplingTensors.from_samplers(samplers, n_vocab, device) for samplers in self._samplers
        ]
        self._last_rows: NDArray[np.int64] | None = None
        self.rows: list[RowIndex] = []

    def update(self, batch: DrawBatch) -> None:
        """Write what differs in this step: positions, token counts, masks and row numbers."""
        bits = batch.sampler.allowed(self._n_vocab)
        first = 0
        for tensors, samplers in zip(self.blocks, self._samplers, strict=True):
            last = first + len(samplers)
            tensors.set_positions(batch.positions[first:last])
            tensors.set_counts(samplers)
            if bits is not None:
                tensors.set_allowed(bits[first:last])
            first = last
        if self._last_rows is None or not np.array_equal(self._last_rows, batch.rows):
            self._last_rows = batch.rows.copy()
            ends = np.cumsum([len(samplers) for samplers in self._samplers])
            self.rows = [
                RowIndex.from_array(rows, self._device)
                for rows in np.split(self._last_rows, ends)[:-1]
            ]
