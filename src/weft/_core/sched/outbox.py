"""What one event loop hands over to the driver, and how it hears of what is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

TURNS = 64  # calls that begin, and tasks that wake, in one pass of a loop


class Outbox:
    """What one event loop hands over, and the tasks of it that wait.

    No pass of the loop is long, and none waits for a lock that is held during a step: of many calls
    TURNS begin in one pass, and of many answers it hears TURNS in one. No timers.
    """

    def __init__(self, enter: Callable[[list[Any]], None]) -> None:
        """enter: called with all jobs that the loop hands over, once a pass of it adds none."""
        self._enter = enter
        self._jobs: list[Any] = []
        self._turns: deque[asyncio.Future[None]] = deque()
        self._n_begun = 0  # calls whose turn was in this pass
        self._fired: deque[asyncio.Future[None]] = deque()  # futures to set, from any thread
        self._is_called = False  # the loop will look at them

    # Handing over

    def begin(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None] | None:
        """Return what a call must wait for before it begins; None: nothing."""
        if self._n_begun < TURNS and not self._turns:
            self._n_begun += 1
            if self._n_begun == 1:
                loop.call_soon(self._next_turns, loop)
            return None
        future = loop.create_future()
        self._turns.append(future)
        return future

    def _next_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        self._n_begun = _set(self._turns)
        if self._n_begun:
            loop.call_soon(self._next_turns, loop)

    def hand_over(self, loop: asyncio.AbstractEventLoop, jobs: list[Any]) -> None:
        """Let jobs enter together with all others of the calls that begin now."""
        if not self._jobs:
            loop.call_soon(self._look, loop, len(jobs))
        self._jobs += jobs

    def _look(self, loop: asyncio.AbstractEventLoop, seen: int) -> None:
        if self._n_begun or seen != len(self._jobs):
            loop.call_soon(self._look, loop, len(self._jobs))
            return
        jobs, self._jobs = self._jobs, []
        self._enter(jobs)

    # Hearing

    def fire(self, future: asyncio.Future[None]) -> None:
        """Let a future of the loop be set after this step; any thread."""
        self._fired.append(future)

    def deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the loop to look at what was fired; any thread."""
        if self._fired and not self._is_called:
            self._is_called = True
            try:
                loop.call_soon_threadsafe(self._set_fired, loop)
            except RuntimeError:  # the loop was closed; nobody is left to hear it
                self._fired.clear()

    def _set_fired(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_called = False  # before looking: what comes from now on calls again
        _set(self._fired)
        self.deliver(loop)


def _set(futures: deque[asyncio.Future[None]]) -> int:
    """Set the first futures that somebody waits for, TURNS at most; return how many."""
    n = 0
    while futures and n < TURNS:
        future = futures.popleft()
        if not future.done():
            future.set_result(None)
            n += 1
    return n


class Waiter:
    """A future that is fired once tickets are done, or when somebody says so."""

    __slots__ = ("_left", "_outbox", "future")
    _left: set[Any] | tuple[()]

    def __init__(
        self, outbox: Outbox, loop: asyncio.AbstractEventLoop, tickets: Sequence[Any] = ()
    ) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._outbox = outbox
        self._left = set(tickets) if len(tickets) > 1 else ()
        for ticket in tickets:
            ticket.on_done(self)

    def __call__(self, ticket: Any) -> None:
        """A ticket is done."""
        if self._left:
            self._left.discard(ticket)
        if not self._left:
            self.fire()

    def fire(self) -> None:
        """Let the task go on that waits; any thread."""
        self._outbox.fire(self.future)
