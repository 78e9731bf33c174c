"""The board: memory that vLLM's workers write logits rows to, and this process reads."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._core import atomic_files

# In a request's extra_args: [slot, ticket]; in additional_config: `SharedLogitsBuffer.told`.
KEY = "weft"
MOST_BYTES = 32 << 20
_SLOTS = 64
_SHARED = Path("/dev/shm")


class SharedLogitsBuffer:
    """Some slots, a logits row each: float32 [n_slots, V], and a ticket that says whose row it is.

    A file in memory where there is such a place. `unlink` takes its name away, once the workers
    have it open: then nothing of it is left when the last process ends, however that comes. Of one
    that is killed before, the next board takes it away.
    """

    def __init__(self, n_vocab: int, most: int) -> None:
        """most: slots; fewer where rows are long. Raises: OSError where there is no room."""
        self.n_vocab = n_vocab
        n_slots = max(1, min(most, MOST_BYTES // (4 * n_vocab)))
        folder = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
        atomic_files.remove_stale_temp_files(folder)
        self._file = atomic_files.open_temp(folder)
        self.path = Path(self._file.name)
        try:
            os.fchmod(self._file.fileno(), 0o600)
            # Allocated at once: a page that is not there when it is written to ends the process.
            os.posix_fallocate(self._file.fileno(), 0, n_bytes(n_slots, n_vocab))
            self.tickets, self.rows = mapped(str(self.path), n_slots, n_vocab)
        except OSError:
            self.unlink()
            raise
        self.free = deque(range(n_slots))
        self.n_slots = n_slots
        self._last = 0

    def told(self) -> dict[str, Any]:
        """Return what a worker has to know to find it."""
        size = {"n_slots": self.n_slots, "n_vocab": self.n_vocab}
        return {"path": str(self.path), "pid": os.getpid(), **size}

    def ticket(self) -> int:
        """Return a number that no other row has."""
        self._last += 1
        return self._last

    def read(self, slot: int, ticket: int) -> NDArray[np.float32] | None:
        """Return a copy of a row; None where nobody has written it."""
        if int(self.tickets[slot]) != ticket:
            return None
        return np.array(self.rows[slot])

    def unlink(self) -> None:
        """Take the file's name away; the memory stays with who has it open."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._file.close()


def n_bytes(n_slots: int, n_vocab: int) -> int:
    """Return how large the file is."""
    return n_slots * (8 + 4 * n_vocab)


def mapped(path: str, n_slots: int, n_vocab: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return views of the file: tickets int64 [n_slots], rows float32 [n_slots, V]."""
    raw = np.memmap(path, np.uint8, "r+", shape=(n_bytes(n_slots, n_vocab),))
    tickets = raw[: 8 * n_slots].view(np.int64)
    rows = raw[8 * n_slots :].view(np.float32).reshape(n_slots, n_vocab)
    return tickets, rows


def try_board(n_vocab: int) -> SharedLogitsBuffer | None:
    """Return a board; None where there is no room for one, or rows of no known length."""
    if n_vocab < 1:
        return None
    try:
        return SharedLogitsBuffer(n_vocab, _SLOTS)
    except OSError:
        return None
