"""A pool of llama.cpp contexts over one model, so that separate prompts do not share a cache.

On a CPU, attention of a token reads the mask of every used cell of its cache, also the cells of
other branches. Branches with different prompts are therefore cheaper in caches of their own, as
long as each cache still has enough branches for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import KVFull, ModelLoadError
from .context import Context, Detachable, Floats
from .leases import END, Cells
from .state import Bytes

MAX_CONTEXTS = 8
_MIN_LEASES = 8  # of each context, before another one is created: fewer rows read all weights
_MIN_CELLS = 1024  # likewise; the masks of fewer cells cost little
_MAX_COPIED = 64  # tokens of a shared prefix that are copied to another context
Result = TypeVar("Result")


class ContextPool(Cells):
    """Sequences of up to `MAX_CONTEXTS` contexts. A lease has the same number in all of them.

    The cells of a lease are in one context, its home. A new path chooses the home with the fewest
    cells. A fork stays in the home of its parent, unless the shared prefix is short.
    """

    def __init__(self, first: Context, new_context: Callable[[int], Context] | None = None) -> None:
        """Start with one context.

        Args:
            first: the first context.
            new_context: creates a further one with a number of leases. None: there are no others.
        """
        self._contexts = [first]
        self._new_context = new_context
        self._homes: dict[int, Context] = {}
        self._ends: dict[int, int] = {}  # number of cells of each lease that has a home

    @property
    def first(self) -> Context:
        """The first context, which always exists."""
        return self._contexts[0]

    @property
    def n_contexts(self) -> int:
        """Number of contexts so far."""
        return len(self._contexts)

    @property
    def n_cells(self) -> int:
        """Number of cells: of the only context, or the maximum to which each one can grow."""
        return self.first.n_cells if len(self._contexts) == 1 else self.first.max_cells

    @property
    def n_leases(self) -> int:  # type: ignore[override]
        """Number of leases so far."""
        return self.first.n_leases

    @property
    def max_leases(self) -> int:  # type: ignore[override]
        """Maximum number of leases after growth."""
        return self.first.max_leases

    @property
    def n_batch(self) -> int:
        """Maximum number of tokens in a call of `run`."""
        return self.first.n_batch

    @n_batch.setter
    def n_batch(self, n: int) -> None:
        self.first.n_batch = n

    @property
    def has_tiles(self) -> bool:
        """True if attention over large batches computes tiles (see `groups_of`)."""
        return self.first.has_tiles

    def reserve(self, n_cells: int, n_leases: int) -> None:
        """Grow to `n_leases` leases, and to `n_cells` cells if there is one context.

        Several contexts grow when their cells do not suffice. Raises: see `Context.reserve`.
        """
        if len(self._contexts) > 1:
            n_cells = 0
        for context in self._contexts:
            context.reserve(n_cells, n_leases)

    def groups(self, leases: Sequence[int]) -> list[tuple[list[int], int]]:
        """Group leases by home; a lease without cells gets one.

        Returns:
            For each home, the indices of its leases, and an upper bound of its used cells.
        """
        indices: dict[Context, list[int]] = {}
        for index, lease in enumerate(leases):
            indices.setdefault(self._home(lease), []).append(index)
        return [(some, self._n_used(context)) for context, some in indices.items()]

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        leases: Sequence[int],
        wanted: NDArray[np.bool_],
        *,
        hidden: bool = False,
    ) -> Floats:
        """Run a batch in the home of its leases, which is the same for all; see `Context.run`."""
        context = self._home(leases[0])
        outputs = self._grown(
            context, lambda: context.run(tokens, positions, leases, wanted, hidden=hidden)
        )
        for lease, position in zip(leases, positions, strict=True):
            self._ends[lease] = position + 1
        return outputs

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of `source` at positions start … end - 1 to lease `target`.

        KV is copied if `target` has another home than `source`.
        """
        above = self._homes.get(source)
        if above is None or start == end:
            return
        n_cells = self._ends[source] if end == END else end
        home = self._homes.get(target)
        if home is None:
            may_leave = n_cells <= _MAX_COPIED and self._is_crowded(above)
            home = self._new_home() if may_leave else above
            self._homes[target] = home
        self._ends[target] = max(self._ends.get(target, 0), n_cells)
        if home is above:
            home.copy(source, target, start, end)
        else:
            self._copy_kv(source, target, start, end)

    def _copy_kv(self, source: int, target: int, start: int, end: int) -> None:
        """Copy KV from the home of `source` to that of `target`. Raises: KVFull."""
        above, home = self._homes[source], self._homes[target]
        # In each other's home both leases are empty, and serve as buffers.
        above.copy(source, target, start, end)
        state = above.take_state(target)
        above.remove(target, 0, END)
        if not self._put_state(home, source, state):
            raise KVFull("llama.cpp has no room", needed=self._ends[target], capacity=home.n_cells)
        home.copy(source, target, 0, END)
        home.remove(source, 0, END)

    def remove(self, lease: int, start: int, end: int) -> None:
        """Remove the cells at positions start … end - 1 from a lease; see `Context.remove`."""
        home = self._homes.get(lease)
        if home is None:
            return
        home.remove(lease, start, end)
        if end == END:
            self._ends[lease] = min(self._ends[lease], start)
            if start == 0:
                del self._homes[lease], self._ends[lease]

    def take_state(self, lease: int) -> Bytes:
        """Serialize the KV of a lease; see `Context.take_state`."""
        return self._home(lease).take_state(lease)

    def put_state(self, lease: int, data: Bytes, n_cells: int) -> bool:
        """Load KV of positions before `n_cells` into a lease; see `Context.put_state`."""
        self._ends[lease] = n_cells
        if self._put_state(self._home(lease), lease, data):
            return True
        self.remove(lease, 0, END)
        return False

    def lend_to(self, reader: Detachable) -> None:
        """Register the result of the last step; see `Context.lend_to`."""
        for context in self._contexts:
            context.lend_to(reader)

    def detach_reader(self) -> None:
        """Detach the result of the last step; see `Context.detach_reader`."""
        for context in self._contexts:
            context.detach_reader()

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Run model calls of the first context on the calling thread; see `Context.one_thread`."""
        with self.first.one_thread():
            yield

    def close(self) -> None:
        """Free all contexts; idempotent."""
        self._new_context = None
        for context in self._contexts:
            context.close()

    def _home(self, lease: int) -> Context:
        """Return the home of a lease; choose one if it has none."""
        home = self._homes.get(lease)
        if home is None:
            home = self._homes[lease] = self._new_home()
            self._ends.setdefault(lease, 0)
        return home

    def _new_home(self) -> Context:
        """Return the context with the fewest used cells; create one if that has many leases."""
        if self._new_context is None:
            return self.first
        context = min(self._contexts, key=self._n_used)
        n_cells = sum([one.n_cells for one in self._contexts])
        has_room = len(self._contexts) < MAX_CONTEXTS and n_cells < self.first.max_cells
        if has_room and self._is_crowded(context):
            try:
                new = self._new_context(self.n_leases)
            except ModelLoadError:  # no memory
                return context
            new.share_with(self.first)
            self._contexts.append(new)
            return new
        return context

    def _is_crowded(self, context: Context) -> bool:
        """Return True if a context has enough leases and cells for another context to pay."""
        n_leases = sum([home is context for home in self._homes.values()])
        return n_leases >= _MIN_LEASES and self._n_used(context) >= _MIN_CELLS

    def _n_used(self, context: Context) -> int:
        """Return an upper bound of the used cells: it counts shared cells once for each lease."""
        return sum([self._ends[lease] for lease, home in self._homes.items() if home is context])

    def _put_state(self, home: Context, lease: int, data: Bytes) -> bool:
        """Load serialized KV into a context; grow it if it has no room. Return True on success."""
        if home.put_state(lease, data):
            return True
        return self._grow(home, 0) and home.put_state(lease, data)

    def _grown(self, context: Context, call: Callable[[], Result]) -> Result:
        """Return the result of a call; if the context has no room for it, grow and call again."""
        try:
            return call()
        except KVFull as error:
            if not self._grow(context, error.needed):
                raise
            return call()

    def _grow(self, context: Context, n: int) -> bool:
        """Double the cells of one of several contexts, at least by `n`. Return True if it grew."""
        before = context.n_cells
        if len(self._contexts) > 1:
            context.reserve(before + max(n, before), 0)
        return context.n_cells > before
