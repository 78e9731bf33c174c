"""Cancel work when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import RequestError


class ServerStopping(RequestError):
    """503: the server stops, so it rejects the request or ends it early."""

    def __init__(self) -> None:
        super().__init__(503, "shutting_down", "this server is stopping")


class CancelScope:
    """A cancel scope: calling it cancels the body of `scope()`, which raises `ServerStopping`.

    Like `asyncio.timeout`, it passes on a cancellation from elsewhere, such as for a client that
    has disconnected.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._is_called = False

    def __call__(self) -> None:
        """Cancel the body of `scope()`, now or when it starts."""
        self._is_called = True
        if self._task is not None:
            self._task.cancel()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run the block so that a call of this object cancels it; one task at a time.

        Raises: ServerStopping if it was cancelled by this object.
        """
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
