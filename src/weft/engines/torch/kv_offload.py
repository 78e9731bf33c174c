"""KV between a device and the host arrays of `export`.

On a card it goes by a stream of its own, beside what is computed, and lies in pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ModelMismatch


class HostTransfer:
    """The way of one memory's KV to the host, and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Host memory that the device may still read, until it is past the event.
        self._read: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    @contextmanager
    def copying_out(self) -> Iterator[None]:
        """Copy to the host in this block: what it made is there when the block ends."""
        aside = self._aside
        if aside is None:
            yield
            return
        aside.wait_stream(torch.cuda.default_stream(self._device))
        try:
            with torch.cuda.stream(aside):
                yield
        finally:
            aside.synchronize()
            self.release()

    @contextmanager
    def copying_in(self, sources: list[Tensor]) -> Iterator[None]:
        """Copy to the device in this block; what is run there later waits, the host does not.

        sources: what is copied. What the block makes on the device stays in it.
        """
        aside = self._aside
        if aside is None:
            yield
            return
        lane = torch.cuda.default_stream(self._device)
        aside.wait_stream(lane)
        try:
            with torch.cuda.stream(aside):
                yield
        finally:
            past = aside.record_event()
            lane.wait_event(past)
            self._read.append((past, sources))
            self.release()

    def release(self) -> None:
        """Give back host memory that the device has read."""
        while self._read and self._read[0][0].query():
            self._read.popleft()


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host, contiguous; bfloat16, which NumPy lacks, as its uint16 bits.

    Of a card: it is there at the end of `HostTransfer.leaving`.
    """
    dense = tensor.contiguous()
    bits = dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense
    if bits.device.type == "cuda":
        pinned = torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=True)
        bits = pinned.copy_(bits, non_blocking=True)
    array: NDArray[Any] = bits.cpu().numpy()
    return array


def from_host(data: dict[str, NDArray[Any]], name: str, like: Tensor) -> Tensor:
    """Return one exported array as it lies on the host, [K, S, D]; `like` is one layer's [n, K, D].

    Raises: ModelMismatch where it is of another model.
    """
    dtype = str(like.dtype).removeprefix("torch.")
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    held = "uint16" if like.dtype == torch.bfloat16 else dtype
    array = data[name]
    if str(array.dtype) != held:
        raise ModelMismatch(
            f"the exported KV has {array.dtype} for {name!r}, this model needs {held}"
        )
    # Itself, as it may be pinned, but for what PyTorch cannot hold as it is.
    is_plain = array.flags.writeable and array.flags.c_contiguous
    tensor = torch.from_numpy(array if is_plain else array.copy(order="C"))
    if like.dtype == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != tuple(like.shape[1:]):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(tensor.shape)} for {name!r}, this model needs "
            f"{(like.shape[1], 'n', like.shape[2])}"
        )
    return tensor
