"""What one event loop hands over to the driver, and how it hears of what is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_PER_PASS = 64  # calls that begin, and tasks that wake, in one pass of a loop


class EventLoopBridge:
    """What one event loop hands over, and the tasks of it that wait.

    No pass of the loop is long, and none waits for a lock that is held during a step: of many calls
    TURNS begin in one pass, and of many answers it hears TURNS in one. No timers.
    """

    def __init__(self, enter: Callable[[list[Any]], None]) -> None:
        """enter: called with all jobs that the loop hands over, once a pass of it adds none."""
        self._enter = enter
        self._jobs: list[Any] = []
        self._delayed: deque[asyncio.Future[None]] = deque()
        self._n_started = 0  # calls whose turn was in this pass
        self._to_wake: deque[asyncio.Future[None]] = deque()  # futures to set, from any thread
        self._is_scheduled = False  # the loop will look at them

    # Handing over

    def start_call(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return what a call must wait for before it begins; None: nothing."""
        if self._n_started < MAX_PER_PASS and not self._delayed:
            self._n_started += 1
            if self._n_started == 1:
                loop.call_soon(self._start_delayed, loop)
            return None
        future = loop.create_future()
        self._delayed.append(future)
        return future

    def _start_delayed(self, loop: asyncio.AbstractEventLoop) -> None:
        self._n_started = _set_results(self._delayed)
        if self._n_started:
            loop.call_soon(self._start_delayed, loop)

    def submit(self, loop: asyncio.AbstractEventLoop, jobs: list[Any]) -> None:
        """Let jobs enter together with all others of the calls that begin now."""
        if not self._jobs:
            loop.call_soon(self._submit_jobs, loop, len(jobs))
        self._jobs += jobs

    def _submit_jobs(self, loop: asyncio.AbstractEventLoop, n_before: int) -> None:
        if self._n_started or n_before != len(self._jobs):
            loop.call_soon(self._submit_jobs, loop, len(self._jobs))
            return
        jobs, self._jobs = self._jobs, []
        self._enter(jobs)

    # Hearing

    def schedule_wake(self, future: asyncio.Future[None]) -> None:
        """Let a future of the loop be set after this step; any thread."""
        self._to_wake.append(future)

    def flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the loop to look at what was fired; any thread."""
        if self._to_wake and not self._is_scheduled:
            self._is_scheduled = True
            try:
                loop.call_soon_threadsafe(self._wake_fired, loop)
            except RuntimeError:  # the loop was closed; nobody is left to hear it
                self._to_wake.clear()

    def _wake_fired(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False  # before looking: what comes from now on calls again
        _set_results(self._to_wake)
        self.flush(loop)


def _set_results(futures: deque[asyncio.Future[None]]) -> int:
    """Set the first futures that somebody waits for, TURNS at most; return how many."""
    n = 0
    while futures and n < MAX_PER_PASS:
        future = futures.popleft()
        if not future.done():
            future.set_result(None)
            n += 1
    return n


class Waiter:
    """A future that is fired once tickets are done, or when somebody says so."""

    __slots__ = ("_bridge", "_pending", "future")
    _pending: set[Any] | tuple[()]

    def __init__(
        self, bridge: EventLoopBridge, loop: asyncio.AbstractEventLoop, tickets: Sequence[Any] = ()
    ) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._bridge = bridge
        self._pending = set(tickets) if len(tickets) > 1 else ()
        for ticket in tickets:
            ticket.on_done(self)

    def __call__(self, ticket: Any) -> None:
        """A ticket is done."""
        if self._pending:
            self._pending.discard(ticket)
        if not self._pending:
            self.wake()

    def wake(self) -> None:
        """Let the task go on that waits; any thread."""
        self._bridge.schedule_wake(self.future)
