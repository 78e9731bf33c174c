"""Rows from one plain forward of a whole context: no KV or row is used or kept by the LM."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Row
from ..sampling.metrics import log_softmax

if TYPE_CHECKING:
    from ..kv.cursor import Place
    from ..lm import LM

Floats = NDArray[np.float32]
Value = TypeVar("Value")


class ExactRows:
    """Plain rows, kept apart from the LM's: at most `n_bytes` of them, any thread may ask.

    Each forward stands alone between two steps of the LM, as a batch would change last bits. From
    event loops one thread of this object's own waits for them, whoever and how many ask.
    """

    def __init__(self, lm: LM, n_bytes: int) -> None:
        self._lm = lm
        self._n_rows = max(1, n_bytes // (4 * lm.info.n_vocab))
        self._rows: OrderedDict[tuple[Any, ...], Floats] = OrderedDict()
        self._lock = threading.Lock()  # of the rows and of the thread's beginning
        self._thread: ThreadPoolExecutor | None = None

    def plain(self, place: Place) -> Floats:
        """Return a row from a forward of its own."""
        ids = place.ids()

        def forward() -> Floats:
            row = Row((), ids, 0, None, (len(ids) - 1,), (), place.namespace)
            return self._lm.engine.forward([row]).logits(0)

        return log_softmax(self._lm.driver.exclusive(forward))

    def rows(self, places: Sequence[Place]) -> list[Floats]:
        """Return the rows of places, the caller's own; each new one costs a forward."""
        return [self._row(place).copy() for place in places]

    async def aplain(self, place: Place) -> Floats:
        """The same as `plain`, awaited."""
        return await self._on_thread(lambda: self.plain(place))

    async def arows(self, places: Sequence[Place]) -> list[Floats]:
        """The same as `rows`, awaited."""
        return await self._on_thread(lambda: self.rows(places))

    def clear(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows.clear()

    def _row(self, place: Place) -> Floats:
        self._lm.see_weights()
        key = (self._lm.scheduler.rows.n_clears, place.namespace, *place.ids())
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                return row
        row = self.plain(place)
        with self._lock:
            self._rows[key] = row
            while len(self._rows) > self._n_rows:
                self._rows.popitem(last=False)
        return row

    async def _on_thread(self, work: Callable[[], Value]) -> Value:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "weft-exact")
            thread = self._thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)
