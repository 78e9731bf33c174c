"""`CancelScope`: work that ends early, because its server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import RequestError


class ServerStopping(RequestError):
    """A request that is refused, or ended early, as the server stops."""

    def __init__(self) -> None:
        super().__init__(503, "shutting_down", "this server is about to stop")


class CancelScope:
    """Ends what stands in `scope`, once called; as `asyncio.timeout` does, but for another reason.

    Who cancels the task beside it, as for a client that is gone, is not held up by it.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._is_called = False

    def __call__(self) -> None:
        """End what stands in `scope`, or will."""
        self._is_called = True
        if self._task is not None:
            self._task.cancel()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Be what ends; one task at a time. Raises: Stopped where it is ended."""
        if self._is_called:
            raise ServerStopping()
        task = asyncio.current_task()
        assert task is not None
        n_cancels, self._task = task.cancelling(), task
        try:
            yield
        except asyncio.CancelledError:
            if self._is_called and task.uncancel() <= n_cancels:
                raise ServerStopping() from None
            raise
        finally:
            self._task = None
