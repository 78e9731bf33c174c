"""A context of llama.cpp: its growing KV cache, and model calls over batches of tokens."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from ...errors import ForwardError, KVFull, ModelLoadError
from ..threads import AutoThreads
from .leases import END, Cells
from .library import Handle, last_error_message
from .state import Bytes, n_cells_of, sorted_state

_log = logging.getLogger("weft.engines.llamacpp")

Floats = NDArray[np.float32]
NewHandle = Callable[[int, int], Handle]  # (number of cells, number of sequences) -> a new context
EXTRA_LEASES = 2  # one for removed cells, one for padding tokens
_HEAD_BYTES = 8  # of a sequence's state: a magic number and the sequence id
_FAULTS = {1: "its cache has no room", 2: "it was stopped", -1: "it rejects the batch"}


class Detachable(Protocol):
    """A step's result that reads llama.cpp's memory until `detach` copies the values."""

    def detach(self) -> None:
        """Copy the values, because the library is about to overwrite its memory."""


class _LibraryMemory:
    """Output of llama.cpp for `np.asarray`. The array keeps the llama.cpp context alive."""

    def __init__(self, handle: Handle, address: int, shape: tuple[int, int]) -> None:
        self._handle = handle
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": np.dtype(np.float32).str,
            "shape": shape,
        }


class CellCount:
    """Mutable total `n` of the cells of a model's contexts; each context keeps it up to date."""

    def __init__(self) -> None:
        self.n = 0


class Context(Cells):
    """A llama.cpp context that grows, with the arrays of its batches.

    A cell holds the KV of one token. A lease stands for a sequence of the context. When more
    cells or leases are needed, a larger context replaces the current one and its KV is copied.
    After `close`, `copy` and `remove` do nothing.

    Each lease consists of `width` llama.cpp sequences with the same cells. Models with a sliding
    window need two: llama.cpp reuses a cell outside the window if only one sequence has it. Such
    a cell may still be needed, because a branch can start there.
    """

    def __init__(
        self,
        new_handle: NewHandle,
        *,
        n_cells: int,
        cell_count: CellCount,
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
        """Create the first context.

        Args:
            new_handle: creates a llama.cpp context with a number of cells and of sequences.
            n_cells: cells at the start.
            cell_count: shared by all contexts of the model.
            n_leases: leases at the start.
            max_leases: maximum number of leases after growth.
            n_vocab: vocabulary size, the length of a logits row.
            n_embd: length of a hidden state.
            n_batch: maximum number of tokens in a call of `run`.
            width: llama.cpp sequences per lease; see the class.
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
        self.max_leases = max_leases
        self._cell_count = cell_count
        self.n_cells = 0
        self._width = width
        self._reader: weakref.ref[Detachable] | None = None
        self._use(new_handle(n_cells, (n_leases + self._n_extra) * width), n_leases)
        self._n_vocab = n_vocab
        self._n_embd = n_embd
        self._state_head: Bytes = np.empty(0, np.uint8)
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
        """Make `handle` the current llama.cpp context, with `n_leases` leases."""
        self._handle: Handle | None = handle
        self._memory = C.llama_get_memory(handle.pointer)
        n_cells = int(C.llama_n_ctx(handle.pointer))
        self._cell_count.n += n_cells - self.n_cells
        self.n_cells = n_cells
        self.n_leases = n_leases
        self._top = 0  # with `in_order`: all used cells are below this index
        self._grave, self._filler = n_leases * self._width, (n_leases + 1) * self._width

    def reuse_from(self, other: Context) -> None:
        """Use the thread tuner and the state header of `other`, a context of the same model."""
        self._auto, self._state_head = other._auto, other._state_head

    def reserve(self, n_leases: int) -> None:
        """Grow to at least `n_leases` leases, or to the maximum if lower.

        Growth at least doubles the number. Raises: see `resize`.
        """
        if n_leases > self.n_leases:
            self.resize(self.n_cells, min(self.max_leases, max(n_leases, 2 * self.n_leases)))

    def resize(self, n_cells: int, n_leases: int = 0) -> None:
        """Replace the context by one with `n_cells` cells, which must suffice for the KV.

        Nothing happens if the sizes are equal, or after `close`. Call this between model calls
        only: it detaches the last result, then frees its logits. Cost: the KV is copied twice.

        Args:
            n_cells: new number of cells.
            n_leases: new number of leases, if it is higher than now.

        Raises:
            KVFull: there is not enough memory for another context.
            ForwardError: llama.cpp rejects the copied KV.
        """
        n_leases = max(n_leases, self.n_leases)
        handle = self._handle
        if handle is None or (n_cells == self.n_cells and n_leases == self.n_leases):
            return
        _log.debug("llama.cpp: a context of %d cells, %d sequences", n_cells, n_leases)
        self.detach_reader()
        state = self._full_state()
        top = self._top
        try:
            new = self._new_handle(n_cells, (n_leases + self._n_extra) * self._width)
        except ModelLoadError as error:
            raise KVFull(
                f"llama.cpp has no memory for {n_cells} tokens: {error}",
                needed=n_cells,
                capacity=self._cell_count.n,
            ) from error
        if C.llama_state_set_data(new.pointer, state, len(state)) != len(state):
            new.close()
            raise ForwardError(f"llama.cpp did not take its own state ({last_error_message()})")
        handle.close()
        self._view = None
        self._n_threads = 0
        self._use(new, n_leases)
        self._top = top

    def _make_room(self, n: int) -> None:
        """With `in_order`: let the next `n` tokens use cells above all used cells.

        The cells are first sorted by position if they are out of order or the end is reached.
        """
        if self._in_order and (not self._is_sorted or self._top + n > self.n_cells):
            assert self._handle is not None
            state = self._full_state()
            if C.llama_state_set_data(self._handle.pointer, state, len(state)) != len(state):
                raise ForwardError(f"llama.cpp did not take its own state ({last_error_message()})")
        self._top += n

    def lend_to(self, reader: Detachable) -> None:
        """Register the result of the last step, which reads llama.cpp's memory instead of a copy.

        `detach_reader` detaches it before that memory changes. Only a weak reference is kept.
        """
        self._reader = weakref.ref(reader)

    def detach_reader(self) -> None:
        """Detach the registered result, if any, because the next call overwrites its logits."""
        reader = None if self._reader is None else self._reader()
        self._reader = None
        if reader is not None:
            reader.detach()

    def _full_state(self) -> Any:
        """Return the serialized KV of all sequences, as a ctypes array of bytes.

        With `in_order`, the cells are sorted by position.
        """
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
        """True after `close`."""
        return self._handle is None

    def close(self) -> None:
        """Free the llama.cpp context; idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()
            self._cell_count.n -= self.n_cells

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of `source` at positions start … end - 1 to lease `target`, without a
        copy.
        """
        if self._handle is None or start == end:
            return
        if self._in_order and C.llama_memory_seq_pos_max(self._memory, target * self._width) >= 0:
            self._is_sorted = False
        for twin in range(self._width):
            C.llama_memory_seq_cp(
                self._memory, source * self._width, target * self._width + twin, start, end
            )

    def remove(self, lease: int, start: int, end: int) -> None:
        """Remove the cells at positions start … end - 1 from a lease, and free those in no
        lease.
        """
        if self._handle is None or start == end:
            return
        if self._in_order:  # else new tokens would reuse the cell, below older tokens
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
        """Run one batch of 1 to `n_batch` tokens; return the outputs of the wanted tokens.

        The caller ensures that the positions of each sequence continue without gaps or repeats.

        Args:
            tokens: token ids.
            positions: the position of each token in its path.
            leases: the lease that each token is written to.
            wanted: True for tokens whose output is returned.
            hidden: return final hidden states instead of logits.

        Returns:
            One row for each wanted token: logits float32 [N, V], or hidden states [N, n_embd].
            The array is the library's memory: the next run overwrites it, and `close` frees it.

        Raises:
            ForwardError: llama.cpp rejects or stops the batch.
            KVFull: the cache has no free cells.
            After an error, some of the tokens may remain in the cache.
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
            self._wanted[n] = count > 0  # the last layer computes only wanted tokens
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
            return self._view_of(get(context), count, width)
        finally:
            if hidden:
                C.llama_set_embeddings(context, False)
            if is_filled:
                C.llama_memory_seq_cp(self._memory, self._filler, self._grave, 0, END)
                for twin in range(self._width):
                    C.llama_memory_seq_rm(self._memory, self._filler + twin, 0, END)

    def _view_of(self, pointer: Any, count: int, width: int) -> Floats:
        """Return an array [count, width] over the library's memory at `pointer`.

        The last array is reused if address and shape are equal, which is the usual case.
        """
        assert self._handle is not None
        address = ctypes.addressof(pointer.contents)
        key = (address, count, width)
        if self._view is None or self._view[0] != key:
            memory = _LibraryMemory(self._handle, address, (count, width))
            self._view = key, np.asarray(memory)
        return self._view[1]

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Run model calls inside the block on the calling thread alone.

        libgomp stops spinning at barriers while it has more threads than there are cores. A thread
        that calls once, such as the one that loads the model, should not start a team.
        """
        assert self._handle is not None
        max_threads, self._max_threads = self._max_threads, 0
        own = C.llama_n_threads(self._handle.pointer)
        C.llama_set_n_threads(self._handle.pointer, 1, 1)
        try:
            yield
        finally:
            C.llama_set_n_threads(self._handle.pointer, own, own)
            self._max_threads, self._n_threads = max_threads, 0

    def _decode(self, context: object, n: int) -> None:
        """Run the first `n` tokens of the batch. Raise ForwardError or KVFull if that fails."""
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
            raise KVFull(why, needed=n, capacity=self._cell_count.n)
        raise ForwardError(f"{why} ({last_error_message()})")

    def take_state(self, lease: int) -> Bytes:
        """Serialize the KV of a lease in llama.cpp's format, without the leading header.

        The header is remembered for `put_state`. Raises: ForwardError after `close`.
        """
        if self._handle is None:
            raise ForwardError("the engine is closed; load the model again")
        context, sequence = self._handle.pointer, lease * self._width
        data = np.empty(C.llama_state_seq_get_size(context, sequence), np.uint8)
        n = C.llama_state_seq_get_data(context, _pointer(data, ctypes.c_uint8), data.size, sequence)
        self._state_head = data[:_HEAD_BYTES].copy()
        return data[_HEAD_BYTES:n]

    def put_state(self, lease: int, data: Bytes) -> bool:
        """Load KV that was serialized as by `take_state` into a lease.

        Call `take_state` at least once before: its header is put in front of `data`.

        Returns:
            False if llama.cpp rejects the data, for example for lack of cells. The lease is then
            empty.

        Raises:
            ForwardError: the context is closed.
        """
        if self._handle is None:
            raise ForwardError("the engine is closed; load the model again")
        self._make_room(n_cells_of(data))
        data = np.concatenate([self._state_head, data])
        context, sequence = self._handle.pointer, lease * self._width
        pointer = _pointer(data, ctypes.c_uint8)
        if C.llama_state_seq_set_data(context, pointer, data.size, sequence) != data.size:
            self.remove(lease, 0, END)
            return False
        for twin in range(1, self._width):
            C.llama_memory_seq_cp(self._memory, sequence, sequence + twin, 0, END)
        return True


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    """Return a C pointer to the array's first item. kind: its ctypes type."""
    return array.ctypes.data_as(ctypes.POINTER(kind))
