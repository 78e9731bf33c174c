"""What a forward of the torch engine gives: logits where they were computed, fetched when read."""

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


_BLOCK_BYTES = 1 << 27  # of log-probabilities that are made together


class DeviceLogits(RetainedLogits):
    """Kept rows on the engine's device and in its dtype. tensor: [N, V], not to be written to.

    Who asks for the log-probabilities of a second row is mostly one of many: those of its
    neighbours are made with it, and are there until others' are made.
    """

    __slots__ = ("_asked", "_at", "_made", "n_bytes", "tensor")

    _last: ClassVar[ReferenceType[DeviceLogits] | None] = None  # one holds what it has made

    def __init__(self, tensor: Tensor, at: Sequence[int] | None = None) -> None:
        """at: the places of those that are kept; None: all, in turn."""
        self.tensor = tensor
        self._at = at
        self._asked = False
        self._made: _LogprobsBlock | None = None
        self.n_bytes = tensor.nbytes

    def place(self, number: int) -> int:
        """Return which row of the tensor an entry is."""
        return number if self._at is None else self._at[number]

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return a row on the host: float32 [V], perhaps the tensor's own memory. Waits."""
        return _to_host(self.tensor[self.place(number)])

    def logprobs(self, number: int, *, on_host: bool) -> Any:
        """Return a row's log-probabilities: float32 [V], an array, or a tensor on the device; the
        caller's own. Raises: ForwardError for a row on the host that is no distribution; one on the
        device is not looked at, as that would wait for it.
        """
        place, device = self.place(number), self.tensor.device
        made = self._logprobs_block(place, on_host=on_host)
        values: Any = made.values[place - made.first]
        if on_host:
            if values[0] != values[0]:  # where one is not a number, none is
                raise broken_logits()
            return values.copy() if made.n > 1 else values
        if made.n > 1:
            with on_default_stream(device):
                values = values.clone()
        if device.type == "cuda":  # the caller may read it on a stream of its own
            values.record_stream(torch.cuda.current_stream(device))
        return values

    def _logprobs_block(self, place: int, *, on_host: bool) -> _LogprobsBlock:
        made = self._made
        if made is not None and made.has(place, on_host=on_host):
            return made
        n_rows = 1
        if self._asked:
            n_rows = max(1, _BLOCK_BYTES // (4 * self.tensor.shape[1]))
        self._asked = True
        first = place // n_rows * n_rows
        made = _LogprobsBlock.from_logits(
            self.tensor[first : first + n_rows], first, on_host=on_host
        )
        if made.n > 1:
            last = DeviceLogits._last
            before = None if last is None else last()
            if before is not None:
                before._made = None
            DeviceLogits._last, self._made = ref(self), made
        return made


class _LogprobsBlock(NamedTuple):
    """Log-probabilities of n rows from `first` on: float32 [n, V], an array or a tensor."""

    first: int
    n: int
    values: Any

    @classmethod
    def from_logits(cls, logits: Tensor, first: int, *, on_host: bool) -> _LogprobsBlock:
        with torch.no_grad(), on_engine_stream(logits.device):
            values = logits.float().log_softmax(-1)
            return cls(first, len(logits), cls._here(values) if on_host else values)

    @staticmethod
    def _here(values: Tensor) -> NDArray[np.float32]:
        if values.is_cuda and len(values) > 1:  # a single row is the caller's own
            pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            values = pinned.copy_(values)
        here: NDArray[np.float32] = values.cpu().numpy()
        return here

    def has(self, place: int, *, on_host: bool) -> bool:
        is_there = self.first <= place < self.first + self.n
        return is_there and isinstance(self.values, Tensor) != on_host


class TorchOutput(Output):
    """Logits [N, V] on the engine's device and in its dtype; scores on the host."""

    __slots__ = ("_device_logits", "_done", "_drawer", "_host_logits", "_scores")

    def __init__(
        self, logits: Tensor, scores: list[list[Score]], sampler: TorchSampler | None = None
    ) -> None:
        """drawer: the engine's, which keeps what its chains brought; None: one for this alone."""
        self._device_logits = logits
        self._host_logits: NDArray[np.float32] | None = None
        self._scores = scores
        self._sampler = TorchSampler(logits.device) if sampler is None else sampler
        self._done = torch.cuda.Event() if logits.device.type == "cuda" else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(logits.device))

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits on the device."""
        return self._device_logits.dtype

    def synchronize(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def logits(self, index: int) -> NDArray[np.float32]:
        if self._host_logits is not None:
            return self._host_logits[index].copy()
        return _to_host(self._device_logits[index]).copy()

    def retain(self, indices: Sequence[int]) -> DeviceLogits:
        """Keep the whole tensor, or copies where most of it would be kept for a few."""
        logits = self._device_logits
        if 2 * len(indices) < len(logits):
            with on_engine_stream(logits.device):
                return DeviceLogits(torch.stack([logits[index] for index in indices]))
        return DeviceLogits(logits, indices)

    def scores(self) -> list[list[Score]]:
        return self._scores

    def draw(self, batch: DrawBatch) -> Draws:
        if self._sampler.supports(batch):
            return self._sampler.draw(self._device_logits, batch)
        return self._sampler.on_host(self._host(), batch)

    def _host(self) -> NDArray[np.float32]:
        if self._host_logits is None:
            self._host_logits = _to_host(self._device_logits)
        return self._host_logits


def _to_host(logits: Tensor) -> NDArray[np.float32]:
    with on_engine_stream(logits.device):
        found: NDArray[np.float32] = logits.float().cpu().numpy()
    return found
