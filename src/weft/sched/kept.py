"""Logits rows that stay with the output of their step until somebody asks for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engines.base import Output


class StepRows:
    """The logits rows of one step; they stay with the engine's output until somebody asks."""

    __slots__ = ("__weakref__", "_fetched", "_output", "n_bytes")

    def __init__(self, output: Output, n_bytes: int, fetch: Sequence[int]) -> None:
        """fetch: rows to copy at once, where the engine's output does not outlive the step."""
        self.n_bytes = n_bytes
        self._fetched = {index: output.logits(index) for index in fetch}
        self._output = None if fetch else output

    def logits(self, index: int) -> Any | None:
        """Return a row, float32 [V], or None once the room was needed."""
        output = self._output
        return self._fetched.get(index) if output is None else output.logits(index)

    def drop(self) -> None:
        """Forget the rows."""
        self._output, self._fetched = None, {}


class KeptRows:
    """The steps whose logits rows somebody may ask for, in a budget of bytes; the oldest go."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._used = 0
        self._order: deque[tuple[weakref.ref[StepRows], int]] = deque()

    def add(self, rows: StepRows) -> StepRows:
        """Keep one more step's rows."""
        self._order.append((weakref.ref(rows), rows.n_bytes))
        self._used += rows.n_bytes
        if self._used > self.budget_bytes:
            self._shrink(rows)
        return rows

    def _shrink(self, newest: StepRows) -> None:
        """Forget what nobody holds; then drop to three quarters, so that this is seldom done."""
        self._order = deque(entry for entry in self._order if entry[0]() is not None)
        self._used = sum(n_bytes for _, n_bytes in self._order)
        while self._used > self.budget_bytes * 3 // 4 and len(self._order) > 1:
            ref, n_bytes = self._order.popleft()
            self._used -= n_bytes
            rows = ref()
            if rows is not None and rows is not newest:
                rows.drop()
