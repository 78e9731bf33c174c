"""The event loop of a vLLM engine: a thread of its own, or the caller's loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ...errors import ForwardError

Value = TypeVar("Value")


class EngineLoop:
    """Runs coroutines for threads that wait for them.

    Args:
        loop: the caller's loop, which is not stopped; None starts a thread with a new one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.is_own = loop is None
        self.loop = asyncio.new_event_loop() if loop is None else loop
        self._thread: threading.Thread | None = None
        if self.is_own:
            self._thread = threading.Thread(
                target=_run, args=(self.loop,), name="weft-vllm", daemon=True
            )
            self._thread.start()

    def call(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine on the loop and wait for it.

        Raises:
            ForwardError: the call is from the loop itself, or the loop does not run.
        """
        try:
            future = self._submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def may_wait(self) -> bool:
        """True if the calling thread can wait for the loop."""
        return not self.is_current_thread() and (self.is_own or self.loop.is_running())

    def is_current_thread(self) -> bool:
        """Return True if the calling thread is the loop's own."""
        return _running_here() is self.loop

    def _submit(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Schedule a coroutine on the loop. Raise ForwardError if this thread cannot wait."""
        if not self.is_own and not self.loop.is_running():
            raise ForwardError(
                "the event loop that created the vLLM engine does not run any more; create and use"
                " the engine under one asyncio.run(…), or create it by weft.load"
            )
        if self.is_current_thread():
            raise ForwardError(
                "a blocking call on the event loop that the vLLM engine itself needs; await the"
                " async form (agrow, acommit, …), or call from another thread"
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def post(self, action: Callable[..., object], *args: Any) -> None:
        """Schedule a call on the loop; any thread may call it.

        Raises:
            RuntimeError: the loop is closed.
        """
        self.loop.call_soon_threadsafe(action, *args)

    def close(self) -> None:
        """Stop the loop's own thread; does not wait when called from that thread."""
        if self._thread is None or self.loop.is_closed():
            return
        self.post(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)


def _running_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its tasks and close it; body of the thread."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
