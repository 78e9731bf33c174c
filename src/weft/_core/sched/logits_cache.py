"""LRU cache of logits rows, with a budget in bytes."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...engines.base import HostLogits, RetainedLogits, RetainedRow
from ...errors import ForwardError, WeftError
from ..kv.place import Cursor, Node, node_at


class LogitsRow:
    """A reference to the raw logits after one path, which stay in the engine until the first read.

    The reference does not keep the logits alive: the cache evicts the least recently used rows, and
    `LogitsCache.read` then returns None.

    node, depth: where the row is attached to the tree; node is None if it is not.
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_entry",
        "_index",
        "_shared",
        "_step_logits",
        "depth",
        "node",
    )

    def __init__(self) -> None:
        self._array: Any = None
        self._shared: HostLogits | None = None  # `_array` for `pin`, created on first use
        self._step_logits: _StepLogits | None = None
        self._index = 0
        self._entry: _LRUEntry | None = None
        self.node: Node | None = None
        self.depth = 0


class PinnedLogits(NamedTuple):
    """A cached row and a strong reference `at` to its logits.

    The logits can be read while this object exists, even after the cache has evicted the row.
    """

    row: LogitsRow
    at: RetainedRow


class _StepLogits:
    """Logits of one step that the engine retains, shared by the rows that were not read yet.

    kept: the engine's logits; None after their eviction.
    """

    __slots__ = ("__weakref__", "_entry", "kept")

    def __init__(self, kept: RetainedLogits) -> None:
        self.kept: RetainedLogits | None = kept
        self._entry: _LRUEntry | None = None


class _LRUEntry(weakref.ref[Any]):
    """The LRU entry of a row or of a step's logits, with its size.

    When the row is garbage-collected, a weakref callback queues the entry for removal.
    """

    __slots__ = ("n_bytes",)
    n_bytes: int


class LogitsCache:
    """LRU cache of logits rows, at most `budget_bytes` of them.

    Rows of places in the tree are attached to nodes (`Node.logits_rows`) and keep their tokens
    known. A branch refers to its own rows. The cache itself has only weak references. Any thread
    may call `set`, `read` and `pin`; callers of the other methods must hold `lock`.
    """

    def __init__(
        self,
        budget_bytes: int,
        n_vocab: int,
        on_last_evicted: Callable[[Node], None],
        lock: threading.RLock,
    ) -> None:
        """Create an empty cache.

        Args:
            budget_bytes: maximum bytes of all logits.
            n_vocab: logits per row.
            on_last_evicted: called with each node whose last attached row was evicted.
            lock: the scheduler's lock.
        """
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.n_clears = 0  # callers drop values derived from rows when this changes
        self._row_bytes = 4 * n_vocab
        self._on_last_evicted = on_last_evicted
        self._lock = lock
        self._order: OrderedDict[int, _LRUEntry] = OrderedDict()
        self._collected: deque[Any] = deque()
        self._on_collected = self._collected.append

    @property
    def max_rows(self) -> int:
        """How many float32 rows fit into `budget_bytes`."""
        return self.budget_bytes // self._row_bytes

    def add(
        self, kept: RetainedLogits, indices: Sequence[int], n_total: int, *, in_tree: bool
    ) -> list[LogitsRow]:
        """Add rows of a step's retained logits; return one LogitsRow per index.

        Evicts nothing: call `evict_excess` after the last call for a step.

        Args:
            kept: the logits that the engine retains.
            indices: the rows of `kept` to add.
            n_total: how many rows of `kept` are added in all calls together.
            in_tree: each row will be attached to the tree and is evicted alone. Otherwise the rows
                are evicted together.
        """
        rows = [LogitsRow() for _ in indices]
        row_bytes, step_logits = kept.n_bytes // n_total, _StepLogits(kept)
        for row, index in zip(rows, indices, strict=True):
            row._index, row._step_logits = index, step_logits
            if in_tree:
                self._mark_used(row, row_bytes)
        if not in_tree:
            self._mark_used(step_logits, row_bytes * len(rows))
        return rows

    def set(self, row: LogitsRow, logits: Any, *, keep: bool = False) -> None:
        """Set the logits of a row; may evict other rows.

        Args:
            row: the row.
            logits: float32 [V]; the caller must not modify it afterwards.
            keep: do not evict this row now, even if it alone exceeds the budget.
        """
        with self._lock:
            row._array, row._step_logits, row._shared = _read_only(logits), None, None
            self._mark_used(row, self._row_bytes)
            self.evict_excess(row if keep else None)

    def read(self, row: LogitsRow) -> Any | None:
        """Return the logits of a row, float32 [V], read-only; None if it was evicted.

        Raises: ForwardError if the engine does not return the row; it is evicted then.
        """
        with self._lock:
            step_logits, row._step_logits = row._step_logits, None
            if step_logits is not None and step_logits.kept is not None:
                array = row._array = self._fetch(row, step_logits.kept)
                if id(step_logits._entry) in self._order:
                    self._order.move_to_end(id(step_logits._entry))
                self._mark_used(row, self._row_bytes)
                del step_logits  # frees the step's logits with its last row, before eviction
                self.evict_excess()
                return array
            if row._entry is not None:
                self._order.move_to_end(id(row._entry))
            return row._array

    def _fetch(self, row: LogitsRow, kept: RetainedLogits) -> Any:
        """Return the logits of a row, copied from the engine. Evicts the row if that fails."""
        try:
            return _read_only(kept.logits(row._index))
        except Exception as error:
            self.evict(row)
            if isinstance(error, WeftError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ForwardError(f"the engine did not return a row it retains: {reason}") from error

    def pin(self, row: LogitsRow) -> PinnedLogits | None:
        """Return a reference that keeps the row's logits readable; None if they were evicted.

        Logits that the engine retains stay on its device: nothing is copied.
        """
        with self._lock:
            step_logits = row._step_logits
            if step_logits is None or step_logits.kept is None:
                array = self.read(row)
                if array is None:
                    return None
                if row._shared is None:
                    row._shared = HostLogits([array])
                return PinnedLogits(row, RetainedRow(row._shared, 0))
            entry = row._entry or step_logits._entry
            assert entry is not None  # retained logits have an entry until they are evicted
            self._order.move_to_end(id(entry))
            return PinnedLogits(row, RetainedRow(step_logits.kept, row._index))

    def read_pinned(self, pinned: PinnedLogits) -> Any:
        """Return the logits of a pinned row: float32 [V], read-only, one array for all callers."""
        array = self.read(pinned.row)
        return _read_only(pinned.at.logits()) if array is None else array

    def attach(self, cursor: Cursor, row: LogitsRow) -> None:
        """Attach a row to the tree, so that others can find it; replaces the row attached there.

        Does nothing at the root.
        """
        node, depth = cursor
        node = node_at(node, depth)
        if node.parent is None:
            return
        if node.logits_rows is None:
            node.logits_rows = {}
        previous = node.logits_rows.get(depth)
        if previous is not None:
            previous.node = None
        row.node, row.depth = node, depth
        node.logits_rows[depth] = row

    def get(self, cursor: Cursor) -> Any | None:
        """Return the logits of the row attached at a position, as `read` does; None if none is."""
        row = self.find(cursor)
        return None if row is None else self.read(row)

    def find(self, cursor: Cursor) -> LogitsRow | None:
        """Return the row attached at a position; None if there is none."""
        node, depth = cursor
        node = node_at(node, depth)
        return node.logits_rows.get(depth) if node.logits_rows else None

    def clear(self) -> None:
        """Evict all rows."""
        self.n_clears += 1
        for entry in list(self._order.values()):
            self._evict_entry(entry)

    def evict_excess(self, protected: LogitsRow | None = None) -> None:
        """Remove unreferenced rows, then evict the least recently used ones down to the budget.

        protected: a row that is not evicted: the most recently used one. None protects no row.
        """
        while self._collected:
            self._remove(self._collected.popleft())
        while self.used_bytes > self.budget_bytes and self._order:
            entry = next(iter(self._order.values()))
            if protected is not None and entry is protected._entry:
                return
            self._evict_entry(entry)

    def _evict_entry(self, entry: _LRUEntry) -> None:
        """Evict a row, or all rows of a step."""
        counted = entry()
        if isinstance(counted, LogitsRow):
            self.evict(counted)
            return
        if counted is not None:
            counted.kept = None
        self._remove(entry)

    def _mark_used(self, counted: LogitsRow | _StepLogits, n_bytes: int) -> None:
        """Mark a row or a step's logits as most recently used, and set its size."""
        entry, order = counted._entry, self._order
        if entry is not None and id(entry) in order:
            self.used_bytes -= entry.n_bytes
            order.move_to_end(id(entry))
        else:
            entry = counted._entry = _LRUEntry(counted, self._on_collected)
            order[id(entry)] = entry
        entry.n_bytes = n_bytes
        self.used_bytes += n_bytes

    def _remove(self, entry: _LRUEntry | None) -> None:
        """Remove an entry, and its bytes from the total."""
        if entry is not None and self._order.pop(id(entry), None) is not None:
            self.used_bytes -= entry.n_bytes

    def evict(self, row: LogitsRow) -> None:
        """Evict one row now, even if it is referenced, and detach it from the tree.

        The caller must hold the lock.
        """
        self._remove(row._entry)
        row._array = row._step_logits = row._entry = row._shared = None
        node, row.node = row.node, None
        if node is not None and node.logits_rows and node.logits_rows.get(row.depth) is row:
            del node.logits_rows[row.depth]
            if not node.logits_rows:
                node.logits_rows = None
                self._on_last_evicted(node)


def _read_only(logits: Any) -> Any:
    """Return the array, marked as read-only."""
    logits.flags.writeable = False
    return logits
