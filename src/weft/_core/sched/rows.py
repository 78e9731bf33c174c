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
    `RowStore.read` gives None then. node, depth: where it hangs in the tree, if it does.
    """

    __slots__ = ("__weakref__", "_array", "_held", "_index", "_ref", "_shared", "depth", "node")

    def __init__(self) -> None:
        self._array: Any = None
        self._shared: HostLogits | None = None  # the same, as it is lent
        self._held: _Held | None = None
        self._index = 0
        self._ref: _Entry | None = None
        self.node: Node | None = None
        self.depth = 0


class LentRow(NamedTuple):
    """A row for work that needs it: its numbers stay, whatever the store forgets meanwhile."""

    row: LogitsRow
    at: RetainedRow


class _Held:
    """What the engine keeps of a step, for rows that nobody has read; None once it has to go."""

    __slots__ = ("__weakref__", "_ref", "kept")

    def __init__(self, kept: RetainedLogits) -> None:
        self.kept: RetainedLogits | None = kept
        self._ref: _Entry | None = None


class _Entry(weakref.ref[Any]):
    """The place of a row, or of rows, in the order of use; its callback tells when it is gone."""

    __slots__ = ("n_bytes",)
    n_bytes: int


class RowStore:
    """Logits rows, the least recently used out first, at most `budget_bytes` of them.

    Rows of the tree's places hang on its nodes (`Node.rows`), and keep their tokens known; a branch
    holds its own. The store itself holds none. Any thread may call; `lock` is the scheduler's.
    """

    def __init__(
        self,
        budget_bytes: int,
        n_vocab: int,
        forget: Callable[[Node], None],
        lock: threading.RLock,
    ) -> None:
        """forget: told of nodes that lost their last row."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.n_clears = 0  # what was drawn from rows before is forgotten with them
        self._row_bytes = 4 * n_vocab
        self._forget = forget
        self._lock = lock
        self._order: OrderedDict[int, _Entry] = OrderedDict()
        self._gone: deque[Any] = deque()
        self._go = self._gone.append

    def keep(
        self, kept: RetainedLogits, numbers: Sequence[int], n_kept: int, *, hung: bool
    ) -> list[LogitsRow]:
        """Return rows `numbers` of what a step keeps; `shrink` is called after all of them.

        n_kept: how many rows that is in all. hung: each is to be hung on the tree, and forgotten by
        itself; the others are forgotten together.
        """
        rows = [LogitsRow() for _ in numbers]
        each, held = kept.n_bytes // n_kept, _Held(kept)
        for row, number in zip(rows, numbers, strict=True):
            row._index, row._held = number, held
            if hung:
                self._enter(row, each)
        if not hung:
            self._enter(held, each * len(rows))
        return rows

    def fill(self, row: LogitsRow, logits: Any, *, wanted: bool = False) -> None:
        """Give a row its numbers: float32 [V], not to be written to any more.

        wanted: it is read right after, so it stays for now, however small the budget is.
        """
        with self._lock:
            row._array, row._held, row._shared = _frozen(logits), None, None
            self._enter(row, self._row_bytes)
            self.shrink(row if wanted else None)

    def read(self, row: LogitsRow) -> Any | None:
        """Return a row's numbers, float32 [V], read-only; None once the room was needed.

        Raises: ForwardError where the engine does not give them, and the row is forgotten.
        """
        with self._lock:
            held, row._held = row._held, None
            if held is not None and held.kept is not None:
                array = row._array = self._fetched(row, held.kept)
                if id(held._ref) in self._order:
                    self._order.move_to_end(id(held._ref))
                self._enter(row, self._row_bytes)
                del held  # with the last of its rows it goes, before anything else has to
                self.shrink()
                return array
            if row._ref is not None:
                self._order.move_to_end(id(row._ref))
            return row._array

    def _fetched(self, row: LogitsRow, kept: RetainedLogits) -> Any:
        try:
            return _frozen(kept.logits(row._index))
        except Exception as error:
            self.drop(row)
            if isinstance(error, WeftError):
                raise
            said = f"{type(error).__name__}: {error}"
            raise ForwardError(f"the engine did not give a row it keeps: {said}") from error

    def lend(self, row: LogitsRow) -> LentRow | None:
        """Return a row where it is; None once the room was needed."""
        with self._lock:
            held = row._held
            if held is None or held.kept is None:
                array = self.read(row)
                if array is None:
                    return None
                if row._shared is None:
                    row._shared = HostLogits([array])
                return LentRow(row, RetainedRow(row._shared, 0))
            entry = row._ref or held._ref
            assert entry is not None  # what is kept is counted, until it has to go
            self._order.move_to_end(id(entry))
            return LentRow(row, RetainedRow(held.kept, row._index))

    def read_lent(self, lent: LentRow) -> Any:
        """Return the numbers of a lent row: float32 [V], read-only; the same to all who read it."""
        array = self.read(lent.row)
        return _frozen(lent.at.logits()) if array is None else array

    def put(self, cursor: Cursor, row: LogitsRow) -> None:
        """Hang a row on the tree, instead of one that hung there."""
        node, depth = cursor
        node = node_at(node, depth)
        if node.parent is None:
            return
        if node.rows is None:
            node.rows = {}
        known = node.rows.get(depth)
        if known is not None:
            known.node = None
        row.node, row.depth = node, depth
        node.rows[depth] = row

    def get(self, cursor: Cursor) -> Any | None:
        """Return the numbers at a place, as `read` does."""
        row = self.at(cursor)
        return None if row is None else self.read(row)

    def at(self, cursor: Cursor) -> LogitsRow | None:
        """Return the row that hangs at a place."""
        node, depth = cursor
        node = node_at(node, depth)
        return node.rows.get(depth) if node.rows else None

    def clear(self) -> None:
        """Forget all rows."""
        self.n_clears += 1
        for entry in list(self._order.values()):
            self._forget_one(entry)

    def shrink(self, spared: LogitsRow | None = None) -> None:
        """Forget what nobody holds, then the least recently used, until the budget holds.

        spared: a row that was used last, and stays for now.
        """
        while self._gone:
            self._leave(self._gone.popleft())
        while self.used_bytes > self.budget_bytes and self._order:
            entry = next(iter(self._order.values()))
            if spared is not None and entry is spared._ref:
                return
            self._forget_one(entry)

    def _forget_one(self, entry: _Entry) -> None:
        counted = entry()
        if isinstance(counted, LogitsRow):
            self.drop(counted)
            return
        if counted is not None:
            counted.kept = None
        self._leave(entry)

    def _enter(self, counted: LogitsRow | _Held, n_bytes: int) -> None:
        """Count a row, or an output, as the one used last."""
        entry, order = counted._ref, self._order
        if entry is not None and id(entry) in order:
            self.used_bytes -= entry.n_bytes
            order.move_to_end(id(entry))
        else:
            entry = counted._ref = _Entry(counted, self._go)
            order[id(entry)] = entry
        entry.n_bytes = n_bytes
        self.used_bytes += n_bytes

    def _leave(self, entry: _Entry | None) -> None:
        if entry is not None and self._order.pop(id(entry), None) is not None:
            self.used_bytes -= entry.n_bytes

    def drop(self, row: LogitsRow) -> None:
        """Forget a row's numbers, whoever holds it; under the lock."""
        self._leave(row._ref)
        row._array = row._held = row._ref = row._shared = None
        node, row.node = row.node, None
        if node is not None and node.rows and node.rows.get(row.depth) is row:
            del node.rows[row.depth]
            if not node.rows:
                node.rows = None
                self._forget(node)


def _frozen(logits: Any) -> Any:
    logits.flags.writeable = False
    return logits
