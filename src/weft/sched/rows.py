"""The one store of logits rows, for all faces: a budget of bytes, fetched when somebody reads."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..kv.place import Cursor, Node, resolve

if TYPE_CHECKING:
    from ..engines.base import Output


class LogitsRow:
    """Raw logits after one path: in the output of the step that made them until somebody reads.

    Whoever holds it holds no numbers for sure: the store forgets the least recently read ones, and
    `RowStore.read` gives None then. node, depth: where it hangs in the tree, if it does.
    """

    __slots__ = ("__weakref__", "_array", "_held", "_index", "_ref", "depth", "node")

    def __init__(self) -> None:
        self._array: Any = None
        self._held: _Held | None = None
        self._index = 0
        self._ref: _Entry | None = None
        self.node: Node | None = None
        self.depth = 0


class _Held:
    """A step's output, for rows that nobody has read yet; None once the room was needed."""

    __slots__ = ("__weakref__", "_ref", "output")

    def __init__(self, output: Output) -> None:
        self.output: Output | None = output
        self._ref: _Entry | None = None


class _Entry(weakref.ref[Any]):
    """A row's place, or an output's, in the order of use; its callback tells when it is gone."""

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

    def keep(
        self, output: Output, indices: Sequence[int], n_kept: int, n_rows: int, *, hung: bool
    ) -> list[LogitsRow]:
        """Return rows `indices` of a finished step's output; `shrink` is called after all of them.

        n_kept, n_rows: how many rows of it are kept in all, and how many it has: they are copied
        at once where most of it would be kept for a few. hung: each is to be hung on the tree, and
        forgotten by itself; the others are forgotten together.
        """
        rows = [LogitsRow() for _ in indices]
        if not self._lasting or 2 * n_kept < n_rows:
            for row, index in zip(rows, indices, strict=True):
                row._array = _frozen(output.logits(index))
                self._enter(row, self._row_bytes)
            return rows
        each = self._row_bytes * n_rows // n_kept
        held = None if hung else _Held(output)
        for row, index in zip(rows, indices, strict=True):
            row._index = index
            if held is None:
                row._held = _Held(output)
                self._enter(row, each)
            else:
                row._held = held
        if held is not None:
            self._enter(held, each * len(rows))
        return rows

    def fill(self, row: LogitsRow, logits: Any, *, wanted: bool = False) -> None:
        """Give a row its numbers: float32 [V], not to be written to any more.

        wanted: it is read right after, so it stays for now, however small the budget is.
        """
        with self._lock:
            row._array, row._held = _frozen(logits), None
            self._enter(row, self._row_bytes)
            self.shrink(row if wanted else None)

    def own(self, logits: Any) -> LogitsRow:
        """Return a row of its holder's own numbers: never forgotten, nor counted."""
        row = LogitsRow()
        row._array = _frozen(logits)
        return row

    def read(self, row: LogitsRow) -> Any | None:
        """Return a row's numbers, float32 [V], read-only; None once the room was needed."""
        with self._lock:
            held, row._held = row._held, None
            if held is not None and held.output is not None:
                array = row._array = _frozen(held.output.logits(row._index))
                if id(held._ref) in self._order:
                    self._order.move_to_end(id(held._ref))
                self._enter(row, self._row_bytes)
                del held  # with its last row the output goes, before anything else has to
                self.shrink()
                return array
            if row._ref is not None:
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
            counted.output = None
        self._leave(entry)

    def _enter(self, counted: LogitsRow | _Held, n_bytes: int) -> None:
        """Count a row, or an output, as the one used last."""
        self._leave(counted._ref)
        entry = counted._ref = _Entry(counted, self._go)
        entry.n_bytes = n_bytes
        self._order[id(entry)] = entry
        self.used_bytes += n_bytes

    def _leave(self, entry: _Entry | None) -> None:
        if entry is not None and self._order.pop(id(entry), None) is not None:
            self.used_bytes -= entry.n_bytes

    def drop(self, row: LogitsRow) -> None:
        """Forget a row's numbers, whoever holds it; under the lock."""
        self._leave(row._ref)
        row._array = row._held = row._ref = None
        node, row.node = row.node, None
        if node is not None and node.rows and node.rows.get(row.depth) is row:
            del node.rows[row.depth]
            if not node.rows:
                node.rows = None
                self._forget(node)


def _frozen(logits: Any) -> Any:
    logits.flags.writeable = False
    return logits
