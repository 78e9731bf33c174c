"""A search's calls of the model, told apart from who waits for them.

A search is written once, as a generator of work. The plain call runs each piece and blocks; the
awaitable call awaits each piece beside a running loop. Both do the same in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import wraps
from inspect import Signature, signature
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from ..lm import LM
from ..loom import Heddle
from ..sched.work import Extend

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Grow:
    """One continuation of each row, all in one batch; `is_over` is looked at after each step."""

    rows: Sequence[Heddle]
    options: dict[str, Any]
    is_over: Callable[[], bool] | None

    def run(self, loop: OwnLoop) -> list[Heddle]:
        """Return the children made, in row order."""
        if self.is_over is None:
            return self.rows[0].grow(at=self.rows, show=False, **self.options)
        seen: dict[int, Heddle] = {}
        with closing(self.rows[0].stream(at=self.rows, **self.options)) as deltas:
            for delta in deltas:
                seen[delta.branch] = delta.node
                if self.is_over():
                    break
        return [node for _, node in sorted(seen.items())]

    async def arun(self) -> list[Heddle]:
        """As `run`, beside a running loop."""
        if self.is_over is None:
            return await self.rows[0].agrow(at=self.rows, **self.options)
        seen: dict[int, Heddle] = {}
        async with aclosing(self.rows[0].astream(at=self.rows, **self.options)) as deltas:
            async for delta in deltas:
                seen[delta.branch] = delta.node
                if self.is_over():
                    break
        return [node for _, node in sorted(seen.items())]


@dataclass(frozen=True, slots=True)
class Read:
    """Logits or scores that are read, all in one batch; nothing is generated."""

    lm: LM
    items: Sequence[Extend]

    def run(self, loop: OwnLoop) -> list[Any]:
        """Return the first output of each item."""
        tickets = self.lm.submit(self.items)
        self.lm.drive(tickets)
        return [ticket.result()[0] for ticket in tickets]

    async def arun(self) -> list[Any]:
        """As `run`, beside a running loop."""
        tickets = await self.lm.asubmit(self.items)
        await self.lm.adrive(tickets)
        return [ticket.result()[0] for ticket in tickets]


@dataclass(frozen=True, slots=True)
class Together:
    """What the caller's async functions returned; all of it is awaited at once."""

    items: Sequence[Awaitable[Any]]

    def run(self, loop: OwnLoop) -> list[Any]:
        """Return the answers, in order; the first error is raised and the others are cancelled."""
        return loop.wait(self.arun())

    async def arun(self) -> list[Any]:
        """As `run`, beside a running loop."""
        tasks = [asyncio.ensure_future(item) for item in self.items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


Work = Grow | Read | Together
Steps = Generator[Work, Any, R]


class OwnLoop:
    """The event loop of a plain call, in a thread of its own from the first thing to await.

    One for the whole search: a client that was opened in one round works in the next. A thread, for
    the caller may stand inside a running loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run it and return what it returns; what interrupts the wait cancels it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = Thread(
                target=self._loop.run_forever, name="weft-search-loop", daemon=True
            )
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop, if there is one, when it has let go of what was cancelled."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_emptied(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _emptied() -> None:
    """Cancel all that still runs in this loop, and wait for its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def run(steps: Steps[R]) -> R:
    """Run all work of a search and return its result."""
    with closing(steps), closing(OwnLoop()) as loop:
        answer: Any = None
        while True:
            try:
                work = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = work.run(loop)


async def arun(steps: Steps[R]) -> R:
    """As `run`, beside a running loop."""
    with closing(steps):
        answer: Any = None
        while True:
            try:
                work = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = await work.arun()


def plain(search: Callable[P, Steps[R]]) -> Callable[P, R]:
    """Return the call that blocks, inside a running loop too, until the search is over."""

    @wraps(search)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(search(*args, **kwargs))

    call.__signature__ = _shown(search)  # type: ignore[attr-defined]
    return call


def awaitable(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the twin of a `plain` call that is awaited and never blocks the loop."""
    search: Callable[P, Steps[R]] = call.__wrapped__  # type: ignore[attr-defined]

    async def acall(*args: P.args, **kwargs: P.kwargs) -> R:
        return await arun(search(*args, **kwargs))

    name = f"a{search.__name__}"
    acall.__name__ = acall.__qualname__ = name
    acall.__module__ = search.__module__
    acall.__doc__ = f"As `{search.__name__}`, beside a running loop. A cancelled task leaves the "
    acall.__doc__ += "tree whole."
    acall.__wrapped__ = search  # type: ignore[attr-defined]
    acall.__signature__ = _shown(search)  # type: ignore[attr-defined]
    return acall


def _shown(search: Callable[..., Any]) -> Signature:
    """Return what callers see: the result, not the work that leads to it."""
    shown = signature(search)
    result = str(shown.return_annotation).removeprefix("Steps[").removesuffix("]")
    return shown.replace(return_annotation=result)
