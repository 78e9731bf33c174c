"""What one event loop hands over to the driver, and how it hears of what is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from .work import Ticket


class Outbox:
    """What one event loop waits for. A step's results reach the loop in one callback."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._submits: list[tuple[Callable[[], list[Ticket]], asyncio.Future[list[Ticket]]]] = []

    def hand_over(
        self,
        loop: asyncio.AbstractEventLoop,
        submit: Callable[[], list[Ticket]],
        lock: threading.RLock,
    ) -> asyncio.Future[list[Ticket]]:
        """Call all of them, under `lock`, once a pass of the loop adds none; no timers."""
        future: asyncio.Future[list[Ticket]] = loop.create_future()
        self._submits.append((submit, future))
        if len(self._submits) == 1:
            loop.call_soon(self._look, loop, lock, 1)
        return future

    def _look(self, loop: asyncio.AbstractEventLoop, lock: threading.RLock, seen: int) -> None:
        if seen != len(self._submits):
            loop.call_soon(self._look, loop, lock, len(self._submits))
            return
        submits, self._submits = self._submits, []
        with lock:  # no step sees half of them
            for submit, future in submits:
                if not future.done():
                    try:
                        future.set_result(submit())
                    except Exception as error:
                        future.set_exception(error)

    def wait(
        self, loop: asyncio.AbstractEventLoop, is_done: Callable[[], bool]
    ) -> asyncio.Future[None]:
        """Return a future that is set once `is_done()` after a step."""
        future = loop.create_future()
        with self._lock:
            self._waiters.append((is_done, future))
        if is_done():
            self.deliver(loop)
        return future

    def deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the loop of all waiters that are done now."""
        with self._lock:
            answers = [is_done() for is_done, _ in self._waiters]
            if not any(answers):
                return
            done = [waiter for waiter, answer in zip(self._waiters, answers, strict=True) if answer]
            self._waiters = [
                waiter for waiter, answer in zip(self._waiters, answers, strict=True) if not answer
            ]
        try:
            loop.call_soon_threadsafe(set_all, [future for _, future in done])
        except RuntimeError:  # the loop was closed; nobody is left to hear it
            return


def set_all(futures: list[asyncio.Future[None]]) -> None:
    """Set futures that still wait."""
    for future in futures:
        if not future.done():
            future.set_result(None)
