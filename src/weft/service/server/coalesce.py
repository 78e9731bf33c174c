"""Work that is done once for all who wait for it: a write for many calls, not one each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Coalescer(Generic[Item]):
    """Does something for whoever waits for a lock at the same time, in one go."""

    def __init__(self, lock: asyncio.Lock, work: Callable[[list[Item]], Awaitable[None]]) -> None:
        """work: called with the lock held."""
        self._lock = lock
        self._work = work
        self._waiting: list[_Pending[Item]] = []

    async def do(self, item: Item) -> None:
        """Have it done for an item; the caller does not hold the lock. Raises: what it raised."""
        wish = _Pending(item)
        self._waiting.append(wish)
        try:
            async with self._lock:
                if not wish.is_done:
                    await self._run_all(wish)
        except asyncio.CancelledError:
            if not wish.is_done and wish in self._waiting:
                self._waiting.remove(wish)
            raise
        if wish.error is not None:
            raise wish.error

    async def _run_all(self, own: _Pending[Item]) -> None:
        wishes, self._waiting = self._waiting, []
        error: Exception | None = None
        try:
            await self._work([wish.item for wish in wishes])
        except Exception as raised:
            error = raised
        except BaseException:  # cancelled: another one who waits does it
            self._waiting[:0] = [wish for wish in wishes if wish is not own]
            raise
        for wish in wishes:
            wish.is_done, wish.error = True, error


@dataclass(eq=False, slots=True)
class _Pending(Generic[Item]):
    item: Item
    is_done: bool = False
    error: Exception | None = None
