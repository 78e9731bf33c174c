"""Helpers of `AsyncLM`: rows of exact log-probabilities, and snapshots of the token tree."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._core.kv.place import Cursor, Place, climb, resolve
from .._core.sampling.metrics import log_softmax
from ..engines.base import Row
from ..lm.lm import LM

Floats = NDArray[np.float32]
Value = TypeVar("Value")


class ExactRows:
    """Cache of exact log-probabilities: each row is computed by a forward of its context alone.

    Batching would change the last bits. A forward runs between two steps of the LM. One worker
    thread of this object waits for forwards on behalf of event loops. The methods can be called
    from any thread.

    n_bytes: maximum size of the cache.
    """

    def __init__(self, lm: LM, n_bytes: int) -> None:
        self._lm = lm
        self._n_rows = max(1, n_bytes // (4 * max(lm.info.n_vocab, 1)))
        self._rows: OrderedDict[tuple[Any, ...], Floats] = OrderedDict()
        self._lock = threading.Lock()  # of the rows and of the thread's start
        self._thread: ThreadPoolExecutor | None = None

    def compute(self, place: Place) -> Floats:
        """Compute the log-probabilities after a place in one forward, without the cache.

        Returns: float32 [V].
        """
        ids = place.ids()

        def forward() -> Floats:
            """Run the engine on the full context; return the logits of the last token."""
            row = Row((), ids, 0, None, (len(ids) - 1,), (), place.namespace)
            return self._lm.engine.forward([row]).logits(0)

        return log_softmax(self._lm.driver.exclusive(forward))

    def rows(self, places: Sequence[Place]) -> list[Floats]:
        """Return copies of the log-probabilities after places, float32 [V] each.

        A row that is not cached costs a forward.
        """
        return [self._cached_row(place).copy() for place in places]

    async def acompute(self, place: Place) -> Floats:
        """Async version of `compute`: waits in a thread, so the event loop is not blocked."""
        return await self._on_thread(lambda: self.compute(place))

    async def arows(self, places: Sequence[Place]) -> list[Floats]:
        """Async version of `rows`: waits in a thread, so the event loop is not blocked."""
        return await self._on_thread(lambda: self.rows(places))

    def clear(self) -> None:
        """Remove all cached rows."""
        with self._lock:
            self._rows.clear()

    def _cached_row(self, place: Place) -> Floats:
        """Return the cached row of a place; compute it if it is missing."""
        self._lm.see_weights()
        key = (self._lm.scheduler.logits_cache.n_clears, place.namespace, *place.ids())
        with self._lock:
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                return row
        row = self.compute(place)
        with self._lock:
            self._rows[key] = row
            while len(self._rows) > self._n_rows:
                self._rows.popitem(last=False)
        return row

    async def _on_thread(self, work: Callable[[], Value]) -> Value:
        """Run a blocking function on the worker thread, and await its result."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "weft-exact")
            thread = self._thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)


@dataclass(frozen=True, slots=True)
class CacheNode:
    """A snapshot of a context in the token tree: how long it is, and what is cached for it.

    n_tokens: number of tokens of the context.
    has_kv: True if the KV of its last token is in the engine's memory. A copy on the host does not
        count.
    logits: a copy of the raw logits after it, float32 [V]; None if they are not cached.
    """

    n_tokens: int
    has_kv: bool
    logits: NDArray[np.float32] | None


def walk(lm: LM, place: Place) -> tuple[CacheNode, int, CacheNode | None, int]:
    """Look up the context of a place; return what `AsyncLM.walk_cache` returns."""
    ids = place.ids()

    def look_up() -> tuple[CacheNode, int, CacheNode | None, int]:
        """Look up the context between two steps."""
        cursor = lm.tree.match(ids, place.namespace)
        matched = resolve(cursor).depth
        base = resident_depth(cursor, len(ids) - 1)
        past = snapshot(lm, Cursor(cursor.node, base)) if base else None
        return snapshot(lm, cursor), matched, past, base

    return lm.driver.exclusive(look_up)


def snapshot(lm: LM, cursor: Cursor) -> CacheNode:
    """Return a snapshot of a place. The caller must hold the driver's lock."""
    at = resolve(cursor)
    row = lm.scheduler.logits_cache.get(at)
    return CacheNode(at.depth, at.node.fragment is not None, None if row is None else row.copy())


def resident_depth(cursor: Cursor, limit: int) -> int:
    """Return how many tokens at the start of a path have KV without a gap.

    limit: maximum of the result.
    """
    depth = min(resolve(cursor).depth, limit)
    for node in climb(cursor):
        if node.fragment is None:
            depth = min(depth, node.start)
    return depth
