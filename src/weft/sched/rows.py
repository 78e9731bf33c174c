"""The one cache of logits rows, shared by every face."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..kv.cursor import Cursor, resolve
from ..kv.node import Node


class CachedRow:
    """Raw logits after the path's first `depth` tokens; moved along when nodes split."""

    __slots__ = ("__weakref__", "depth", "logits", "node")

    def __init__(self, node: Node, depth: int, logits: Any) -> None:
        self.node = node
        self.depth = depth
        self.logits = logits


class RowCache:
    """Logits rows by place, least recently used out first, at most `budget_bytes` of them.

    The rows hang on the tree's nodes (`Node.rows`), and keep their tokens known.
    """

    def __init__(self, budget_bytes: int, forget: Callable[[Node], None]) -> None:
        """forget: told of nodes that lost their last row."""
        self.budget_bytes = budget_bytes
        self._forget = forget
        self.used_bytes = 0
        self._order: OrderedDict[CachedRow, None] = OrderedDict()

    def get(self, cursor: Cursor) -> Any | None:
        """Return the row (shared: copy before giving it away), or None."""
        node, depth = resolve(cursor)
        row = node.rows.get(depth) if node.rows else None
        if row is None:
            return None
        self._order.move_to_end(row)
        return row.logits

    def put(self, cursor: Cursor, logits: Any) -> None:
        """Keep a row; makes room by forgetting the least recently used ones."""
        node, depth = resolve(cursor)
        if node.parent is None or logits.nbytes > self.budget_bytes:
            return
        if node.rows is None:
            node.rows = {}
        known = node.rows.get(depth)
        if known is not None:
            self._remove(known)
        row = node.rows[depth] = CachedRow(node, depth, logits)
        self._order[row] = None
        self.used_bytes += logits.nbytes
        while self.used_bytes > self.budget_bytes:
            oldest = next(iter(self._order))
            self._remove(oldest)
            rows = oldest.node.rows
            if rows and rows.get(oldest.depth) is oldest:
                del rows[oldest.depth]
                if not rows:
                    oldest.node.rows = None
                    self._forget(oldest.node)

    def clear(self) -> None:
        """Forget all rows."""
        for row in self._order:
            row.node.rows = None
        self._order.clear()
        self.used_bytes = 0

    def _remove(self, row: CachedRow) -> None:
        del self._order[row]
        self.used_bytes -= row.logits.nbytes
