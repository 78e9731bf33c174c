"""Run work once for all callers that wait for a lock, such as one database write for many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Coalescer(Generic[Item]):
    """Collects the items of concurrent callers, and processes them in one batch.

    lock: acquired while a batch is processed.
    work: called with the batch, a list of items.
    """

    def __init__(self, lock: asyncio.Lock, work: Callable[[list[Item]], Awaitable[None]]) -> None:
        self._lock = lock
        self._work = work
        self._waiting: list[_Pending[Item]] = []

    async def do(self, item: Item) -> None:
        """Process an item in a batch with those of other waiting callers; return afterwards.

        The caller must not hold the lock. Raises: the error that `work` raised for the batch.
        """
        pending = _Pending(item)
        self._waiting.append(pending)
        try:
            async with self._lock:
                if not pending.is_done:
                    await self._run_all(pending)
        except asyncio.CancelledError:
            if not pending.is_done and pending in self._waiting:
                self._waiting.remove(pending)
            raise
        if pending.error is not None:
            raise pending.error

    async def _run_all(self, own: _Pending[Item]) -> None:
        """Process all waiting items in one batch, `own` among them. The caller holds the lock."""
        batch, self._waiting = self._waiting, []
        error: Exception | None = None
        try:
            await self._work([pending.item for pending in batch])
        except Exception as raised:
            error = raised
        except BaseException:  # cancelled: another waiting caller processes the items
            self._waiting[:0] = [pending for pending in batch if pending is not own]
            raise
        for pending in batch:
            pending.is_done, pending.error = True, error


@dataclass(eq=False, slots=True)
class _Pending(Generic[Item]):
    """An item that waits for its batch. Then `is_done` is True and `error` that of the batch."""

    item: Item
    is_done: bool = False
    error: Exception | None = None
