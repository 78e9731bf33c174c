"""The one store of logits rows, for all faces: a budget of bytes, fetched when somebody reads."""

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
    """Raw logits after one path: where the engine keeps them until somebody reads.

    Whoever holds it holds no numbers for sure: the store forgets the least recently read ones, and
    `LogitsCache.read` gives None then. node, depth: where it hangs in the tree, if it does.
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
        self._shared: HostLogits | None = None  # the same, as it is lent
        self._step_logits: _StepLogits | None = None
        self._index = 0
        self._entry: _LRUEntry | None = None
        self.node: Node | None = None
        self.depth = 0


class PinnedLogits(NamedTuple):
    """A row for work that needs it: its numbers stay, whatever the store forgets meanwhile."""

    row: LogitsRow
    at: RetainedRow


class _StepLogits:
    """What the engine keeps of a step, for rows that nobody has read; None once it has to go."""

    __slots__ = ("__weakref__", "_entry", "kept")

    def __init__(self, kept: RetainedLogits) -> None:
        self.kept: RetainedLogits | None = kept
        self._entry: _LRUEntry | None = None


class _LRUEntry(weakref.ref[Any]):
    """The place of a row, or of rows, in the order of use; its callback tells when it is gone."""

    __slots__ = ("n_bytes",)
    n_bytes: int


class LogitsCache:
    """Logits rows, the least recently used out first, at most `budget_bytes` of them.

    Rows of the tree's places hang on its nodes (`Node.rows`), and keep their tokens known; a branch
    holds its own. The store itself holds none. Any thread may call; `lock` is the scheduler's.
    """

    def __init__(
        self,
        budget_bytes: int,
        n_vocab: int,
        on_last_evicted: Callable[[Node], None],
        lock: threading.RLock,
    ) -> None:
        """forget: told of nodes that lost their last row."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.n_clears = 0  # what was drawn from rows before is forgotten with them
        self._row_bytes = 4 * n_vocab
        self._on_last_evicted = on_last_evicted
        self._lock = lock
        self._order: OrderedDict[int, _LRUEntry] = OrderedDict()
        self._collected: deque[Any] = deque()
        self._on_collected = self._collected.append

    def add(
        self, kept: RetainedLogits, indices: Sequence[int], n_total: int, *, in_tree: bool
    ) -> list[LogitsRow]:
        """Return rows `indices` of what a step keeps; `shrink` is called after all of them.

        n_kept: how many rows that is in all. hung: each is to be hung on the tree, and forgotten by
        itself; the others are forgotten together.
        """
        rows = [LogitsRow() for _ in indices]
        row_bytes, step_logits = kept.n_bytes // n_total, _StepLogits(kept)
        for row, index in zip(rows, indices, strict=True):
            row._index, row._step_logits = index, step_logits
            if in_tree:
                self._touch(row, row_bytes)
        if not in_tree:
            self._touch(step_logits, row_bytes * len(rows))
        return rows

    def set(self, row: LogitsRow, logits: Any, *, keep: bool = False) -> None:
        """Give a row its numbers: float32 [V], not to be written to any more.

        wanted: it is read right after, so it stays for now, however small the budget is.
        """
        with self._lock:
            row._array, row._step_logits, row._shared = _read_only(logits), None, None
            self._touch(row, self._row_bytes)
            self.evict_excess(row if keep else None)

    def read(self, row: LogitsRow) -> Any | None:
        """Return a row's numbers, float32 [V], read-only; None once the room was needed.

        Raises: ForwardError where the engine does not give them, and the row is forgotten.
        """
        with self._lock:
            step_logits, row._step_logits = row._step_logits, None
            if step_logits is not None and step_logits.kept is not None:
                array = row._array = self._fetch(row, step_logits.kept)
                if id(step_logits._entry) in self._order:
                    self._order.move_to_end(id(step_logits._entry))
                self._touch(row, self._row_bytes)
                del step_logits  # with the last of its rows it goes, before anything else has to
                self.evict_excess()
                return array
            if row._entry is not None:
                self._order.move_to_end(id(row._entry))
            return row._array

    def _fetch(self, row: LogitsRow, kept: RetainedLogits) -> Any:
        try:
            return _read_only(kept.logits(row._index))
        except Exception as error:
            self.evict(row)
            if isinstance(error, WeftError):
                raise
            said = f"{type(error).__name__}: {error}"
            raise ForwardError(f"the engine did not give a row it keeps: {said}") from error

    def pin(self, row: LogitsRow) -> PinnedLogits | None:
        """Return a row where it is; None once the room was needed."""
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
            assert entry is not None  # what is kept is counted, until it has to go
            self._order.move_to_end(id(entry))
            return PinnedLogits(row, RetainedRow(step_logits.kept, row._index))

    def read_pinned(self, pinned: PinnedLogits) -> Any:
        """Return the numbers of a lent row: float32 [V], read-only; the same to all who read it."""
        array = self.read(pinned.row)
        return _read_only(pinned.at.logits()) if array is None else array

    def attach(self, cursor: Cursor, row: LogitsRow) -> None:
        """Hang a row on the tree, instead of one that hung there."""
        node, depth = cursor
        node = node_at(node, depth)
        if node.parent is None:
            return
        if node.logits_rows is None:
            node.logits_rows = {}
        known = node.logits_rows.get(depth)
        if known is not None:
            known.node = None
        row.node, row.depth = node, depth
        node.logits_rows[depth] = row

    def get(self, cursor: Cursor) -> Any | None:
        """Return the numbers at a place, as `read` does."""
        row = self.find(cursor)
        return None if row is None else self.read(row)

    def find(self, cursor: Cursor) -> LogitsRow | None:
        """Return the row that hangs at a place."""
        node, depth = cursor
        node = node_at(node, depth)
        return node.logits_rows.get(depth) if node.logits_rows else None

    def clear(self) -> None:
        """Forget all rows."""
        self.n_clears += 1
        for entry in list(self._order.values()):
            self._evict_entry(entry)

    def evict_excess(self, protected: LogitsRow | None = None) -> None:
        """Forget what nobody holds, then the least recently used, until the budget holds.

        spared: a row that was used last, and stays for now.
        """
        while self._collected:
            self._remove(self._collected.popleft())
        while self.used_bytes > self.budget_bytes and self._order:
            entry = next(iter(self._order.values()))
            if protected is not None and entry is protected._entry:
                return
            self._evict_entry(entry)

    def _evict_entry(self, entry: _LRUEntry) -> None:
        counted = entry()
        if isinstance(counted, LogitsRow):
            self.evict(counted)
            return
        if counted is not None:
            counted.kept = None
        self._remove(entry)

    def _touch(self, counted: LogitsRow | _StepLogits, n_bytes: int) -> None:
        """Count a row, or an output, as the one used last."""
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
        if entry is not None and self._order.pop(id(entry), None) is not None:
            self.used_bytes -= entry.n_bytes

    def evict(self, row: LogitsRow) -> None:
        """Forget a row's numbers, whoever holds it; under the lock."""
        self._remove(row._entry)
        row._array = row._step_logits = row._entry = row._shared = None
        node, row.node = row.node, None
        if node is not None and node.logits_rows and node.logits_rows.get(row.depth) is row:
            del node.logits_rows[row.depth]
            if not node.logits_rows:
                node.logits_rows = None
                self._on_last_evicted(node)


def _read_only(logits: Any) -> Any:
    logits.flags.writeable = False
    return logits
