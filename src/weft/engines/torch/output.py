"""Results of a forward of the torch engine: logits stay on the device until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..._core.sampling.metrics import broken_logits
from ..base import Draws, Output, RetainedLogits, Score
from .execution import on_default_stream, on_engine_stream
from .sampling.sampler import TorchSampler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..._core.sampling.sampler import DrawBatch


_BLOCK_BYTES = 1 << 27  # of log-probabilities that are computed together


class DeviceLogits(RetainedLogits):
    """Retained logits on the engine's device and in its dtype. tensor: [N, V], read-only.

    A caller that reads the log-probabilities of a second row usually reads many. So those of its
    neighbours are computed together, and cached until those of another object are.
    """

    __slots__ = ("_block", "_indices", "_was_read", "n_bytes", "tensor")

    _last: ClassVar[ReferenceType[DeviceLogits] | None] = None  # the object with a cached block

    def __init__(self, tensor: Tensor, indices: Sequence[int] | None = None) -> None:
        """indices: row numbers in the tensor of the retained entries; None: all rows in order."""
        self.tensor = tensor
        self._indices = indices
        self._was_read = False
        self._block: _LogprobsBlock | None = None
        self.n_bytes = tensor.nbytes

    def place(self, number: int) -> int:
        """Return the row of `tensor` that entry `number` refers to."""
        return number if self._indices is None else self._indices[number]

    def logits(self, number: int) -> NDArray[np.float32]:
        """Wait, and return the logits of entry `number` on the host: float32 [V].

        They may share the tensor's memory.
        """
        return _to_host(self.tensor[self.place(number)])

    def logprobs(self, number: int, *, on_host: bool) -> Any:
        """Return log-probabilities of an entry, owned by the caller: float32 [V], an array or a
        tensor.

        Raises: ForwardError for logits on the host that are not a distribution. Tensors are not
        checked, because that would wait for the device.
        """
        place, device = self.place(number), self.tensor.device
        block = self._logprobs_block(place, on_host=on_host)
        values: Any = block.values[place - block.first]
        if on_host:
            if values[0] != values[0]:  # a NaN makes the full row NaN
                raise broken_logits()
            return values.copy() if block.n > 1 else values
        if block.n > 1:
            with on_default_stream(device):
                values = values.clone()
        if device.type == "cuda":  # the caller may read it on a stream of its own
            values.record_stream(torch.cuda.current_stream(device))
        return values

    def _logprobs_block(self, place: int, *, on_host: bool) -> _LogprobsBlock:
        """Return the log-probabilities of rows around row `place`, cached or computed."""
        block = self._block
        if block is not None and block.has(place, on_host=on_host):
            return block
        n_rows = 1
        if self._was_read:
            n_rows = max(1, _BLOCK_BYTES // (4 * self.tensor.shape[1]))
        self._was_read = True
        first = place // n_rows * n_rows
        block = _LogprobsBlock.from_logits(
            self.tensor[first : first + n_rows], first, on_host=on_host
        )
        if block.n > 1:
            previous = None if DeviceLogits._last is None else DeviceLogits._last()
            if previous is not None:
                previous._block = None
            DeviceLogits._last, self._block = ref(self), block
        return block


class _LogprobsBlock(NamedTuple):
    """Log-probabilities of n rows from `first` on: float32 [n, V], an array or a tensor."""

    first: int
    n: int
    values: Any

    @classmethod
    def from_logits(cls, logits: Tensor, first: int, *, on_host: bool) -> _LogprobsBlock:
        """Compute the log-probabilities of rows from number `first` on. logits: [n, V]."""
        with torch.no_grad(), on_engine_stream(logits.device):
            values = logits.float().log_softmax(-1)
            return cls(first, len(logits), cls._to_host(values) if on_host else values)

    @staticmethod
    def _to_host(values: Tensor) -> NDArray[np.float32]:
        """Copy log-probabilities to a NumPy array, through pinned memory from a GPU."""
        if values.is_cuda and len(values) > 1:  # a single row is returned without a copy
            pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            values = pinned.copy_(values)
        array: NDArray[np.float32] = values.cpu().numpy()
        return array

    def has(self, place: int, *, on_host: bool) -> bool:
        """Return True if the block contains row `place` on the wanted side, host or device."""
        contains = self.first <= place < self.first + self.n
        return contains and isinstance(self.values, Tensor) != on_host


class TorchOutput(Output):
    """Logits [N, V] on the engine's device and in its dtype; scores on the host."""

    __slots__ = ("_device_logits", "_done", "_host_logits", "_sampler", "_scores")

    def __init__(
        self, logits: Tensor, scores: list[list[Score]], sampler: TorchSampler | None = None
    ) -> None:
        """sampler: the engine's, which caches the tensors of its chains; None: a new one."""
        self._device_logits = logits
        self._host_logits: NDArray[np.float32] | None = None
        self._scores = scores
        self._sampler = TorchSampler(logits.device) if sampler is None else sampler
        self._done = torch.cuda.Event() if logits.device.type == "cuda" else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(logits.device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits on the device."""
        return self._device_logits.dtype

    def synchronize(self) -> None:
        """Wait until the device has computed the logits."""
        if self._done is not None:
            self._done.synchronize()

    def logits(self, index: int) -> NDArray[np.float32]:
        """Wait, and return a copy of logits `index` on the host: float32 [V]."""
        if self._host_logits is not None:
            return self._host_logits[index].copy()
        return _to_host(self._device_logits[index]).copy()

    def retain(self, indices: Sequence[int]) -> DeviceLogits:
        """Retain the full tensor, or copies if less than half of its rows are retained."""
        logits = self._device_logits
        if 2 * len(indices) < len(logits):
            with on_engine_stream(logits.device):
                return DeviceLogits(torch.stack([logits[index] for index in indices]))
        return DeviceLogits(logits, indices)

    def scores(self) -> list[list[Score]]:
        """Return one list per row, one `Score` per `ScoreSpan`."""
        return self._scores

    def draw(self, batch: DrawBatch) -> Draws:
        """Start sampling from these logits; see `Output.draw`."""
        if self._sampler.supports(batch):
            return self._sampler.draw(self._device_logits, batch)
        return self._sampler.on_host(self._host(), batch)

    def _host(self) -> NDArray[np.float32]:
        """Return all logits on the host: float32 [N, V], copied once."""
        if self._host_logits is None:
            self._host_logits = _to_host(self._device_logits)
        return self._host_logits


def _to_host(logits: Tensor) -> NDArray[np.float32]:
    """Copy logits to the host as float32."""
    with on_engine_stream(logits.device):
        array: NDArray[np.float32] = logits.float().cpu().numpy()
    return array
