"""One context of llama.cpp: its KV cache, which grows, and a model call over a batch."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from ...errors import ForwardError, KVFull, ModelLoadError
from ..threads import AutoThreads
from .leases import END, Cells
from .library import Handle, last_words
from .state import n_cells_of, sorted_state

_log = logging.getLogger("weft.engines.llamacpp")

Floats = NDArray[np.float32]
NewHandle = Callable[[int, int], Handle]  # of a context with so many cells and sequences
EXTRA_LEASES = 2  # one for cells that are given up, one for tokens that fill up a batch
_HEAD_BYTES = 8  # of a state: what it is, and whose
_FAULTS = {1: "it found no room in its cache", 2: "it was stopped", -1: "it refuses the batch"}


class Detachable(Protocol):
    """A step result that reads the library's memory until it is detached."""

    def detach(self) -> None:
        """Copy the values that are still in the library's memory."""


class Context(Cells):
    """A context and the arrays of its batches. A closed one forgets in silence and runs nothing.

    It starts with `n_cells` cells and `n_leases` leases. When more are needed, up to `max_cells`
    and `max_leases`, the library's context is re-created, twice as large or more, and its KV moved.

    Each lease is `width` sequences of the library that always see the same: with a sliding window
    it writes over cells that one sequence alone sees and that have left its window, although a
    branch may still begin there; it never does so where two see them.
    """

    def __init__(
        self,
        new_handle: NewHandle,
        *,
        n_cells: int,
        max_cells: int,
        n_leases: int,
        max_leases: int,
        n_vocab: int,
        n_embd: int,
        n_batch: int,
        width: int,
        max_threads: int = 0,
        in_order: bool = False,
        min_batch: int = 1,
        has_tiles: bool = False,
    ) -> None:
        """See the class.

        Args:
            max_threads: maximum of the thread count per call; 0 keeps the context's own count.
            in_order: keep each sequence's cells in the order of positions. Attention sums cells
                in cache order, so another order rounds differently.
            min_batch: pad a call that has fewer tokens, or fewer output rows, by one token that no
                other token attends to.
            has_tiles: attention over large batches computes tiles (see `groups_of`).
        """
        self.has_tiles = has_tiles
        self._in_order, self._min_batch = in_order, min_batch
        self._n_extra = EXTRA_LEASES if in_order else 0
        self._is_sorted = True
        self._new_handle = new_handle
        self.max_cells, self.max_leases = max_cells, max_leases
        self._width = width
        self._reader: weakref.ref[Detachable] | None = None
        self._use(new_handle(n_cells, (n_leases + self._n_extra) * width), n_leases)
        self._n_vocab = n_vocab
        self._n_embd = n_embd
        self._state_head = b""
        self._view: tuple[tuple[int, int, int], Floats] | None = None
        self.n_batch = n_batch
        self._max_threads = max_threads
        self._n_threads = 0  # of the last call
        self._auto = AutoThreads()
        n_room = n_batch + min_batch - 1
        # NOTE: the library reads these arrays through the pointers in the batch.
        self._tokens = np.zeros(n_room, np.int32)
        self._positions = np.zeros(n_room, np.int32)
        self._sequences = np.zeros((n_room, width), np.int32)
        self._n_sequences = np.full(n_room, width, np.int32)
        self._wanted = np.zeros(n_room, np.int8)
        first, step = self._sequences.ctypes.data, self._sequences.strides[0]
        self._rows = np.arange(n_room, dtype=np.uint64) * np.uint64(step) + np.uint64(first)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._n_sequences, ctypes.c_int32),
            seq_id=_pointer(self._rows, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def _use(self, handle: Handle, n_leases: int) -> None:
        self._handle: Handle | None = handle
        self._memory = C.llama_get_memory(handle.pointer)
        self.n_cells = int(C.llama_n_ctx(handle.pointer))
        self.n_leases = n_leases
        self._top = 0  # cells are taken below it, if they are kept in order
        self._grave, self._filler = n_leases * self._width, (n_leases + 1) * self._width

    def reserve(self, n_cells: int, n_leases: int) -> None:
        """Grow to at least this many cells and leases, up to the maximum.

        Call it between model calls; logits in the library's memory are lost. Cost of growth: the
        KV is copied twice. Raises: KVFull if there is not enough memory.
        """
        n_cells = min(n_cells, self.max_cells)
        n_leases = min(n_leases, self.max_leases)
        handle = self._handle
        if handle is None or (n_cells <= self.n_cells and n_leases <= self.n_leases):
            return
        if n_cells > self.n_cells:
            n_cells = min(self.max_cells, max(n_cells, 2 * self.n_cells))
        else:
            n_cells = self.n_cells
        if n_leases > self.n_leases:
            n_leases = min(self.max_leases, max(n_leases, 2 * self.n_leases))
        else:
            n_leases = self.n_leases
        _log.debug("llama.cpp: the context grows to %d cells, %d sequences", n_cells, n_leases)
        self.detach_reader()
        state = self._whole_state()
        top = self._top
        try:
            larger = self._new_handle(n_cells, (n_leases + self._n_extra) * self._width)
        except ModelLoadError as error:
            raise KVFull(
                f"llama.cpp has no memory for {n_cells} tokens: {error}",
                needed=n_cells,
                capacity=self.n_cells,
            ) from error
        if C.llama_state_set_data(larger.pointer, state, len(state)) != len(state):
            larger.close()
            raise ForwardError(f"llama.cpp did not take its own state ({last_words()})")
        handle.close()
        self._view = None
        self._n_threads = 0
        self._use(larger, n_leases)
        self._top = top

    def _make_room(self, n: int) -> None:
        """Make the next `n` tokens take cells above all others; sort the cells if necessary."""
        if self._in_order and (not self._is_sorted or self._top + n > self.n_cells):
            assert self._handle is not None
            state = self._whole_state()
            if C.llama_state_set_data(self._handle.pointer, state, len(state)) != len(state):
                raise ForwardError(f"llama.cpp did not take its own state ({last_words()})")
        self._top += n

    def lend_to(self, reader: Detachable) -> None:
        """Register a result, to detach it before the library's memory changes; a weak reference."""
        self._reader = weakref.ref(reader)

    def detach_reader(self) -> None:
        """Detach the last step's result, because the next step overwrites its logits."""
        reader = None if self._reader is None else self._reader()
        self._reader = None
        if reader is not None:
            reader.detach()

    def _whole_state(self) -> Any:
        assert self._handle is not None
        if self._in_order:
            C.llama_memory_seq_rm(self._memory, self._grave, 0, END)
        size = C.llama_state_get_size(self._handle.pointer)
        state = (ctypes.c_uint8 * size)()
        n = C.llama_state_get_data(self._handle.pointer, state, size)
        assert n == size
        if not self._in_order:
            return state
        data, self._top = sorted_state(bytes(memoryview(state)))
        self._is_sorted = True
        return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._handle is None

    def close(self) -> None:
        """Free it; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        if self._handle is None or start == end:
            return
        if self._in_order and C.llama_memory_seq_pos_max(self._memory, target * self._width) >= 0:
            self._is_sorted = False
        for twin in range(self._width):
            C.llama_memory_seq_cp(
                self._memory, source * self._width, target * self._width + twin, start, end
            )

    def remove(self, lease: int, start: int, end: int) -> None:
        if self._handle is None or start == end:
            return
        if self._in_order:  # a free cell would be taken again, below those of older tokens
            C.llama_memory_seq_cp(self._memory, lease * self._width, self._grave, start, end)
        for twin in range(self._width):
            C.llama_memory_seq_rm(self._memory, lease * self._width + twin, start, end)

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        leases: Sequence[int],
        wanted: NDArray[np.bool_],
        *,
        hidden: bool = False,
    ) -> Floats:
        """Run tokens, at most `n_batch`; return the logits, or hidden states, of those wanted.

        Each sequence goes on without a gap, and no position comes twice: the caller sees to it.
        Returns: float32 [N, V] or [N, n_embd], the library's own memory until the next run.
        Raises: ForwardError, KVFull; what it had stored may still be there.
        """
        n = len(tokens)
        assert self._handle is not None and 0 < n <= self.n_batch
        context = self._handle.pointer
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._wanted[:n] = wanted
        first = np.asarray(leases, np.int32) * self._width
        for twin in range(self._width):
            self._sequences[:n, twin] = first + twin
        count = int(np.count_nonzero(self._wanted[:n]))
        is_filled = n < self._min_batch or 0 < count < self._min_batch
        if is_filled:
            self._tokens[n] = self._positions[n] = 0
            self._wanted[n] = count > 0  # the last layer computes the wanted tokens only
            self._sequences[n] = [self._filler + twin for twin in range(self._width)]
        self._batch.n_tokens = n + is_filled
        self._make_room(n + is_filled)
        if hidden:
            C.llama_set_embeddings(context, True)
        try:
            self._decode(context, n + is_filled)
            width = self._n_embd if hidden else self._n_vocab
            if not count:
                return np.empty((0, width), np.float32)
            get = C.llama_get_embeddings if hidden else C.llama_get_logits
            return self._seen(get(context), count, width)
        finally:
            if hidden:
                C.llama_set_embeddings(context, False)
            if is_filled:
                C.llama_memory_seq_cp(self._memory, self._filler, self._grave, 0, END)
                for twin in range(self._width):
                    C.llama_memory_seq_rm(self._memory, self._filler + twin, 0, END)

    def _seen(self, pointer: Any, count: int, width: int) -> Floats:
        """Return what lies at a pointer of the library's, mostly where it lay the last time."""
        key = (ctypes.addressof(pointer.contents), count, width)
        if self._view is None or self._view[0] != key:
            self._view = key, np.ctypeslib.as_array(pointer, shape=(count, width))
        return self._view[1]

    def _decode(self, context: object, n: int) -> None:
        if not self._max_threads:
            fault = C.llama_decode(context, self._batch)
        else:
            with self._auto.measured(n, self._max_threads) as threads:
                if threads != self._n_threads:
                    self._n_threads = threads
                    C.llama_set_n_threads(context, threads, threads)
                fault = C.llama_decode(context, self._batch)
        if fault == 0:
            return
        why = f"llama.cpp cannot run {n} tokens: {_FAULTS.get(fault, f'error {fault}')}"
        if fault == 1:
            raise KVFull(why, needed=n, capacity=self.n_cells)
        raise ForwardError(f"{why} ({last_words()})")

    def take_state(self, lease: int) -> bytes:
        """Return what the library says of a sequence's cells, without its mark and the sequence."""
        if self._handle is None:
            raise ForwardError("the engine is closed; load the model again")
        context, sequence = self._handle.pointer, lease * self._width
        size = C.llama_state_seq_get_size(context, sequence)
        room = (ctypes.c_uint8 * size)()
        n = C.llama_state_seq_get_data(context, room, size, sequence)
        data = bytes(memoryview(room)[:n])
        self._state_head = data[:_HEAD_BYTES]
        return data[_HEAD_BYTES:]

    def put_state(self, lease: int, data: bytes) -> bool:
        """Give a sequence the cells that `take_state` said; whether it took them.

        Some state was taken before, whose head goes before this one.
        """
        if self._handle is None:
            raise ForwardError("the engine is closed; load the model again")
        self._make_room(n_cells_of(data))
        data = self._state_head + data
        context, sequence = self._handle.pointer, lease * self._width
        room = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if C.llama_state_seq_set_data(context, room, len(data), sequence) != len(data):
            self.remove(lease, 0, END)
            return False
        for twin in range(1, self._width):
            C.llama_memory_seq_cp(self._memory, sequence, sequence + twin, 0, END)
        return True


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
