"""Copies of KV between a device and the host arrays of `export`.

On a GPU they use a stream of their own and pinned memory, so that steps continue.
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
    """Copies one backend's KV to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Host memory that the device reads until the event.
        self._in_use: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    @contextmanager
    def copying_out(self) -> Iterator[None]:
        """Copy to the host in a block; the arrays are complete when the block ends."""
        stream = self._copy_stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.default_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
            self.release()

    @contextmanager
    def copying_in(self, sources: list[Tensor]) -> Iterator[None]:
        """Copy to the device in a block. Later work on the device waits for it, the host does not.

        sources: the host tensors. Tensors that the block allocates must not be used after it.
        """
        stream = self._copy_stream
        if stream is None:
            yield
            return
        engine_stream = torch.cuda.default_stream(self._device)
        stream.wait_stream(engine_stream)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            done = stream.record_event()
            engine_stream.wait_event(done)
            self._in_use.append((done, sources))
            self.release()

    def release(self) -> None:
        """Release host memory that the device has read."""
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host, contiguous. bfloat16, which NumPy lacks, becomes its uint16 bits.

    From a GPU, the array is complete at the end of `HostTransfer.copying_out`.
    """
    dense = tensor.contiguous()
    bits = dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense
    if bits.device.type == "cuda":
        pinned = torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=True)
        bits = pinned.copy_(bits, non_blocking=True)
    array: NDArray[Any] = bits.cpu().numpy()
    return array


def from_host(data: dict[str, NDArray[Any]], name: str, like: Tensor) -> Tensor:
    """Return one exported array as a host tensor, [K, S, D]. like: a tensor of one layer, [n, K,
    D].

    Raises: ModelMismatch if it is from another model.
    """
    dtype = str(like.dtype).removeprefix("torch.")
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    stored_dtype = "uint16" if like.dtype == torch.bfloat16 else dtype
    array = data[name]
    if str(array.dtype) != stored_dtype:
        raise ModelMismatch(
            f"the exported KV has {array.dtype} for {name!r}, this model needs {stored_dtype}"
        )
    # Avoid a copy, because the array may be in pinned memory.
    is_usable = array.flags.writeable and array.flags.c_contiguous
    tensor = torch.from_numpy(array if is_usable else array.copy(order="C"))
    if like.dtype == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != tuple(like.shape[1:]):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(tensor.shape)} for {name!r}, this model needs "
            f"{(like.shape[1], 'n', like.shape[2])}"
        )
    return tensor
