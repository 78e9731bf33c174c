"""Timeouts for clients that stop in the middle of a request."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_log = logging.getLogger(__name__)
# Seconds for a request's headers, from the opening of its connection or its first byte, and
# between two pieces of its body.
REQUEST_S = 30.0


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with a timeout for incomplete requests.

    uvicorn itself closes only connections that are idle after a response.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer for the headers of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Process bytes, and restart the timer if the request is incomplete."""
        super().data_received(data)
        is_head = self.cycle is None or self.cycle.response_complete
        if is_head and self._timer is not None:
            return
        self._stop_timer()
        if is_head or self.cycle.more_body:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def _start_timer(self) -> None:
        """Start or restart the timer."""
        self._timer = self.loop.call_later(REQUEST_S, self._on_timeout)

    def _stop_timer(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        """Close the connection of a client that did not complete its request in time."""
        if self.flow.read_paused:  # the application is slow, not the client
            self._start_timer()
            return
        self._timer = None
        _log.info("closing a connection: no complete request within %g s", REQUEST_S)
        self.transport.close()
