"""The event loop that a vLLM engine lives on: a thread of its own, or its owner's."""

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

    loop: of somebody else, which is left as it is; None starts a thread with one.
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
        """Run a coroutine there and wait for it.

        Raises: ForwardError where that cannot be: from the loop itself, or where it stands still.
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
        """Whether the calling thread can wait for the loop."""
        return not self.is_here() and (self.is_own or self.loop.is_running())

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return _running_here() is self.loop

    def _submit(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        if not self.is_own and not self.loop.is_running():
            raise ForwardError(
                "the event loop that the vLLM engine was made in does not run any more; make the"
                " engine and use it under one asyncio.run(…), or let weft.load make it"
            )
        if self.is_here():
            raise ForwardError(
                "a call that waits, from the event loop that the vLLM engine itself needs; await"
                " the async form (agrow, acommit, …), or call from another thread"
            )
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def post(self, action: Callable[..., object], *given: Any) -> None:
        """Let the loop call something soon; any thread. Raises: RuntimeError once it is closed."""
        self.loop.call_soon_threadsafe(action, *given)

    def close(self) -> None:
        """End the thread, if it is this one's; does not wait when called by the thread itself."""
        if self._thread is None or self.loop.is_closed():
            return
        self.post(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=5))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
