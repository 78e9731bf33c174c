"""The beat at which streams tell what is new: one timer for all of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S = 0.05  # between two events that bring tokens: 20 a second, however fast the model is
_MAX_TICK_S = 0.25  # however many are told
_SHARE = 0.1  # of the time that telling may take: the model waits for it
_NEW = 0.2  # how much the last beat counts for what the next one is taken to cost


class Ticker:
    """Lets all who wait go on at once, `TICK_S` apart; used from one event loop.

    A timer for each would wake the loop once for each, and let the model wait as often. Where very
    many are told, beats are further apart, so that the loop is busy for a tenth of the time.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._cost_s = 0.0  # of a beat, in seconds of this thread's CPU
        self._used_s: float | None = None  # by the thread, at the last beat

    @property
    def tick_s(self) -> float:
        """Seconds between two beats now."""
        return max(TICK_S, self._cost_s / _SHARE)

    async def wait(self, over: asyncio.Future[None]) -> None:
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
            self._timer = loop.call_later(self.tick_s, self._tick, loop)
        try:
            await mine
        finally:
            over.remove_done_callback(hurry)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now, waiting, used_s = loop.time(), self._waiting, time.thread_time()
        if self._used_s is not None:
            cost_s = min(
                used_s - self._used_s, _MAX_TICK_S * _SHARE
            )  # or what was between two calls
            self._cost_s += _NEW * (cost_s - self._cost_s)
        self._used_s = used_s
        while waiting and waiting[0][0] <= now:
            _set(waiting.popleft()[1])
        # Who is woken waits again in a moment, for the beat after the next at the latest.
        self._timer = loop.call_later(self.tick_s, self._tick, loop) if waiting else None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
