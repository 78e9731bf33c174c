"""The one store of logits rows, for all faces: a budget of bytes, fetched when somebody reads."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..kv.cursor import Cursor, resolve
from ..kv.node import Node

if TYPE_CHECKING:
    from ..engines.base import Output


class LogitsRow:
    """Raw logits after one path: in the output of the step that made them until somebody reads.

    Whoever holds it holds no numbers for sure: the store forgets the least recently read ones, and
    `RowStore.read` gives None then. node, depth: where it hangs in the tree, if it does.
    """

    __slots__ = ("__weakref__", "_array", "_index", "_output", "_ref", "depth", "node")

    def __init__(self) -> None:
        self._array: Any = None
        self._output: Output | None = None
        self._index = 0
        self._ref: _Entry | None = None
        self.node: Node | None = None
        self.depth = 0


class _Entry(weakref.ref[LogitsRow]):
    """A row's place in the order of use; its callback tells when nobody has the row any more."""

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
        *,
        lasting: bool = True,
    ) -> None:
        """forget: told of nodes that lost their last row. lasting: an output may be asked later."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.n_clears = 0  # what was drawn from rows before is forgotten with them
        self._row_bytes = 4 * n_vocab
        self._forget = forget
        self._lock = lock
        self._lasting = lasting
        self._order: OrderedDict[int, _Entry] = OrderedDict()
        self._gone: deque[Any] = deque()
        self._go = self._gone.append

    def keep(self, output: Output, n_rows: int, indices: Sequence[int]) -> list[LogitsRow]:
        """Return rows `indices` of a finished step's output, which has `n_rows` of them.

        They are copied at once where most of the output would be kept for a few of its rows.
        """
        rows = []
        later = self._lasting and 2 * len(indices) >= n_rows
        each = self._row_bytes * n_rows // max(len(indices), 1)
        for index in indices:
            row = LogitsRow()
            if later:
                row._output, row._index = output, index
            else:
                row._array = _frozen(output.logits(index))
            rows.append(row)
        self._enter_all(rows, each if later else self._row_bytes)
        self._shrink()
        return rows

    def fill(self, row: LogitsRow, logits: Any) -> None:
        """Give a row its numbers: float32 [V], not to be written to any more."""
        with self._lock:
            row._array, row._output = _frozen(logits), None
            self._enter(row, self._row_bytes)
            self._shrink()

    def own(self, logits: Any) -> LogitsRow:
        """Return a row of its holder's own numbers: never forgotten, nor counted."""
        row = LogitsRow()
        row._array = _frozen(logits)
        return row

    def read(self, row: LogitsRow) -> Any | None:
        """Return a row's numbers, float32 [V], read-only; None once the room was needed."""
        with self._lock:
            output = row._output
            if output is not None:
                row._array, row._output = _frozen(output.logits(row._index)), None
                self._enter(row, self._row_bytes)
            elif row._ref is not None:
                self._order.move_to_end(id(row._ref))
            return row._array

    def put(self, cursor: Cursor, row: LogitsRow) -> None:
        """Hang a row on the tree, instead of one that hung there."""
        node, depth = resolve(cursor)
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
        node, depth = resolve(cursor)
        row = node.rows.get(depth) if node.rows else None
        return None if row is None else self.read(row)

    def clear(self) -> None:
        """Forget all rows."""
        self.n_clears += 1
        for entry in list(self._order.values()):
            row = entry()
            if row is not None:
                self.drop(row)

    def _enter(self, row: LogitsRow, n_bytes: int) -> None:
        """Count a row as the one used last."""
        self._leave(row._ref)
        self._enter_all([row], n_bytes)

    def _enter_all(self, rows: Sequence[LogitsRow], n_bytes: int) -> None:
        """Count rows that are not counted, the last one as used last; so many bytes each."""
        order, go = self._order, self._go
        for row in rows:
            entry = row._ref = _Entry(row, go)
            entry.n_bytes = n_bytes
            order[id(entry)] = entry
        self.used_bytes += n_bytes * len(rows)

    def _leave(self, entry: _Entry | None) -> None:
        if entry is not None and self._order.pop(id(entry), None) is not None:
            self.used_bytes -= entry.n_bytes

    def _shrink(self) -> None:
        """Forget what nobody holds, then the least recently used, until the budget holds."""
        while self._gone:
            self._leave(self._gone.popleft())
        while self.used_bytes > self.budget_bytes and self._order:
            entry = next(iter(self._order.values()))
            row = entry()
            if row is None:
                self._leave(entry)
            else:
                self.drop(row)

    def drop(self, row: LogitsRow) -> None:
        """Forget a row's numbers, whoever holds it; under the lock."""
        self._leave(row._ref)
        row._array = row._output = row._ref = None
        node, row.node = row.node, None
        if node is not None and node.rows and node.rows.get(row.depth) is row:
            del node.rows[row.depth]
            if not node.rows:
                node.rows = None
                self._forget(node)


def _frozen(logits: Any) -> Any:
    logits.flags.writeable = False
    return logits
