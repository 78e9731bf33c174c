"""Shared memory that vLLM's workers write logits to."""

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
MAX_BYTES = 32 << 20
_SLOTS = 64
_SHARED = Path("/dev/shm")


class SharedLogitsBuffer:
    """Slots with one row of logits each, float32 [n_slots, V], and a ticket that identifies the
    request.

    The buffer is a file in shared memory if possible. `unlink` removes its name after the workers
    have opened it, so that nothing remains when the last process exits. If a process is killed
    before, the next buffer removes the file.
    """

    def __init__(self, n_vocab: int, max_slots: int) -> None:
        """Create the file.

        Args:
            n_vocab: logits per row.
            max_slots: number of slots; less for large vocabularies.

        Raises:
            OSError: there is not enough memory.
        """
        self.n_vocab = n_vocab
        n_slots = max(1, min(max_slots, MAX_BYTES // (4 * n_vocab)))
        folder = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
        atomic_files.remove_stale_temp_files(folder)
        self._file = atomic_files.open_temp(folder)
        self.path = Path(self._file.name)
        try:
            os.fchmod(self._file.fileno(), 0o600)
            # Allocated now: a write to a missing page would kill the process.
            os.posix_fallocate(self._file.fileno(), 0, n_bytes(n_slots, n_vocab))
            self.tickets, self.rows = map_buffer(str(self.path), n_slots, n_vocab)
        except OSError:
            self.unlink()
            raise
        self.free = deque(range(n_slots))
        self.n_slots = n_slots
        self._last = 0

    def connection_info(self) -> dict[str, Any]:
        """Return the data that a worker needs to open the buffer."""
        size = {"n_slots": self.n_slots, "n_vocab": self.n_vocab}
        return {"path": str(self.path), "pid": os.getpid(), **size}

    def ticket(self) -> int:
        """Return a new ticket number."""
        self._last += 1
        return self._last

    def read(self, slot: int, ticket: int) -> NDArray[np.float32] | None:
        """Return a copy of a slot's logits; None if no worker has written them."""
        if int(self.tickets[slot]) != ticket:
            return None
        return np.array(self.rows[slot])

    def unlink(self) -> None:
        """Remove the file's name; processes that have opened it keep the memory."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._file.close()


def n_bytes(n_slots: int, n_vocab: int) -> int:
    """Return the size of the file."""
    return n_slots * (8 + 4 * n_vocab)


def map_buffer(
    path: str, n_slots: int, n_vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return views of the file: tickets int64 [n_slots], rows float32 [n_slots, V]."""
    raw = np.memmap(path, np.uint8, "r+", shape=(n_bytes(n_slots, n_vocab),))
    tickets = raw[: 8 * n_slots].view(np.int64)
    rows = raw[8 * n_slots :].view(np.float32).reshape(n_slots, n_vocab)
    return tickets, rows


def try_create_buffer(n_vocab: int) -> SharedLogitsBuffer | None:
    """Return a buffer; None if there is no memory for one, or the vocabulary size is unknown."""
    if n_vocab < 1:
        return None
    try:
        return SharedLogitsBuffer(n_vocab, _SLOTS)
    except OSError:
        return None
