"""The beat at which streams tell what is new: one timer for all of them."""

from __future__ import annotations

import asyncio
from collections import deque

TICK_S = 0.05  # between two events that bring tokens: 20 a second, however fast the model is


class Pulse:
    """Lets all who wait go on at once, `TICK_S` apart; used from one event loop.

    A timer for each would wake the loop once for each, and let the model wait as often.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def beat(self, over: asyncio.Future[None]) -> None:
        """Wait for the next beat, half a tick from now at the earliest; or until `over` is set."""
        if over.done():
            return
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()

        def hurry(_: asyncio.Future[None]) -> None:
            _set(mine)

        over.add_done_callback(hurry)
        self._waiting.append((loop.time() + TICK_S / 2, mine))
        if self._timer is None:
            self._timer = loop.call_later(TICK_S, self._beat, loop)
        try:
            await mine
        finally:
            over.remove_done_callback(hurry)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now, waiting = loop.time(), self._waiting
        while waiting and waiting[0][0] <= now:
            _set(waiting.popleft()[1])
        # Who is woken waits again in a moment, for the beat after the next at the latest.
        self._timer = loop.call_later(TICK_S, self._beat, loop) if waiting else None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
