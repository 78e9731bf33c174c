"""One timer for all event streams: they publish new tokens at the same moments."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S = 0.05  # seconds between two events with tokens of one stream, at least
_MAX_TICK_S = 0.25  # upper bound of the time between two ticks
_SHARE = 0.1  # the share of the loop's time that streams may take
_NEW = 0.2  # weight of the last tick in the moving average of the cost


class Ticker:
    """Wakes all waiting streams at once, `TICK_S` apart; used from one event loop.

    One timer per stream would wake the loop once per stream and delay the model as often. With many
    streams the ticks are further apart, so that streams take about a tenth of the loop's time.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._cost_s = 0.0  # moving average: CPU seconds of this thread per tick
        self._used_s: float | None = None  # CPU time of this thread at the last tick

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks at present."""
        return max(TICK_S, self._cost_s / _SHARE)

    async def wait(self, over: asyncio.Future[None]) -> None:
        """Wait for the next tick that is at least half an interval away.

        Returns early once `over` is done.
        """
        if over.done():
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(_: asyncio.Future[None]) -> None:
            _resolve(woken)

        over.add_done_callback(wake)
        self._waiting.append((loop.time() + TICK_S / 2, woken))
        if self._timer is None:
            self._timer = loop.call_later(self.tick_s, self._tick, loop)
        try:
            await woken
        finally:
            over.remove_done_callback(wake)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the waiting streams, and set the time of the next tick."""
        now, waiting, used_s = loop.time(), self._waiting, time.thread_time()
        if self._used_s is not None:
            cost_s = min(
                used_s - self._used_s, _MAX_TICK_S * _SHARE
            )  # capped: other work ran meanwhile, too
            self._cost_s += _NEW * (cost_s - self._cost_s)
        self._used_s = used_s
        while waiting and waiting[0][0] <= now:
            _resolve(waiting.popleft()[1])
        # Woken streams wait again soon: for the tick after the next at the latest.
        self._timer = loop.call_later(self.tick_s, self._tick, loop) if waiting else None


def _resolve(future: asyncio.Future[None]) -> None:
    """Resolve a future unless it is done."""
    if not future.done():
        future.set_result(None)
