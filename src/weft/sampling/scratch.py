"""Working memory kept between draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Larger arrays are not kept: there the arithmetic outweighs the page faults, and memory is dear.
_KEPT_BYTES = 8 << 20


class Scratch:
    """Buffers by name, reused from call to call.

    Fresh ones cost more in page faults than the arithmetic done in them. Contents are undefined
    when taken. One thread at a time.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of that shape, valid until the next `take` of the same name."""
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == shape and kept.dtype == dtype:
            return kept
        fresh: NDArray[Any] = np.empty(shape, dtype)
        if fresh.nbytes <= _KEPT_BYTES:
            self._buffers[name] = fresh
        return fresh
