"""Release memory after loading: pages of mapped weight files, and freed heap."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

from torch import Tensor

_DONTNEED = 4  # MADV_DONTNEED of Linux
_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The files that are mapped into this process, to release pages of weights in them.

    The system reads a released page from the file again when it is used, so no number changes.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if sys.platform == "linux" and _MAPS.exists():
            lines = _MAPS.read_text("ascii", errors="replace").splitlines()
            self._ranges = [
                (start, end)
                for line in lines
                if ".safetensors" in line
                for start, end in [_range_of(line)]
            ]

    def release(self, weight: Tensor) -> None:
        """Release the pages that contain only this weight, if it is in a mapped file."""
        start = weight.data_ptr()
        end = start + weight.nbytes
        if any(low <= start and end <= high for low, high in self._ranges):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            n_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
            if n_bytes > 0:
                ctypes.CDLL(None).madvise(
                    ctypes.c_void_p(first), ctypes.c_size_t(n_bytes), _DONTNEED
                )


def release_heap() -> None:
    """Return freed heap memory to the system; with glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _range_of(line: str) -> tuple[int, int]:
    """Parse the address range of a line in /proc/self/maps."""
    start, _, end = line.split(maxsplit=1)[0].partition("-")
    return int(start, 16), int(end, 16)
