"""Bridge between an asyncio event loop and the driver: batches submissions and wake-ups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_PER_PASS = 64  # calls that start, and tasks that wake, in one iteration of an event loop


class EventLoopBridge:
    """Connects one asyncio event loop with the driver: batches its submissions and wake-ups.

    No iteration of the loop is long, and none waits for the scheduler's lock. In one iteration, at
    most MAX_PER_PASS calls start and MAX_PER_PASS tasks wake. There are no timers.
    """

    def __init__(self, enter: Callable[[list[Any]], None]) -> None:
        """enter: called with the submitted jobs, once an iteration of the loop has added none."""
        self._enter = enter
        self._jobs: list[Any] = []
        self._delayed: deque[asyncio.Future[None]] = deque()
        self._n_started = 0  # calls started in this iteration
        self._to_wake: deque[asyncio.Future[None]] = deque()  # filled by any thread
        self._is_scheduled = False  # the loop will call `_wake_fired`

    # From the loop to the driver

    def start_call(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Count a call that starts now; return None if it may, else a future to await first.

        At most MAX_PER_PASS calls start in one iteration of the loop; later ones are delayed.
        """
        if self._n_started < MAX_PER_PASS and not self._delayed:
            self._n_started += 1
            if self._n_started == 1:
                loop.call_soon(self._start_delayed, loop)
            return None
        future = loop.create_future()
        self._delayed.append(future)
        return future

    def _start_delayed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let delayed calls start, at most MAX_PER_PASS."""
        self._n_started = _set_results(self._delayed)
        if self._n_started:
            loop.call_soon(self._start_delayed, loop)

    def submit(self, loop: asyncio.AbstractEventLoop, jobs: list[Any]) -> None:
        """Collect jobs; all jobs of this iteration's calls are submitted together, later."""
        if not self._jobs:
            loop.call_soon(self._submit_jobs, loop, len(jobs))
        self._jobs += jobs

    def _submit_jobs(self, loop: asyncio.AbstractEventLoop, n_before: int) -> None:
        """Submit the collected jobs, once an iteration of the loop has added none."""
        if self._n_started or n_before != len(self._jobs):
            loop.call_soon(self._submit_jobs, loop, len(self._jobs))
            return
        jobs, self._jobs = self._jobs, []
        self._enter(jobs)

    # From the driver to the loop

    def schedule_wake(self, future: asyncio.Future[None]) -> None:
        """Queue a future of the loop, whose result is set after the next `flush`. Any thread."""
        self._to_wake.append(future)

    def flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop set the results of the queued futures soon, if there are any. Any thread."""
        if self._to_wake and not self._is_scheduled:
            self._is_scheduled = True
            try:
                loop.call_soon_threadsafe(self._wake_queued, loop)
            except RuntimeError:  # the loop is closed, so no task waits
                self._to_wake.clear()

    def _wake_queued(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the results of queued futures, at most MAX_PER_PASS per iteration of the loop."""
        self._is_scheduled = False  # reset first: later entries must schedule another call
        _set_results(self._to_wake)
        self.flush(loop)


def _set_results(futures: deque[asyncio.Future[None]]) -> int:
    """Remove futures from the front and set their results, at most MAX_PER_PASS.

    Futures that are done already do not count. Returns how many results were set.
    """
    n = 0
    while futures and n < MAX_PER_PASS:
        future = futures.popleft()
        if not future.done():
            future.set_result(None)
            n += 1
    return n


class Waiter:
    """An asyncio future that is set once all tickets are done, or by `wake`.

    Without tickets, only `wake` sets it.
    """

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
        """Callback of a ticket that is done; after the last one, wake the future."""
        if self._pending:
            self._pending.discard(ticket)
        if not self._pending:
            self.wake()

    def wake(self) -> None:
        """Queue the future, so that the loop sets its result. Any thread may call it."""
        self._bridge.schedule_wake(self.future)
