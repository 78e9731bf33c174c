"""HTTP to one server, on its own thread: timeouts, errors and the API key.

Callers retry, as `RetryPolicy` says.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2

from ...errors import ContextOverflow, ForwardError, StaleHandle, WeftError
from .address import Address
from .responses import (
    MAX_BYTES,
    EventStreamParser,
    Overflow,
    ProtocolError,
    error_text,
    overflow_of,
    parse_json,
)

Value = TypeVar("Value")
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_ERROR_BYTES = 1 << 16  # bytes of an error that are read
_FIRST_WAIT_S, _MAX_WAIT_S = 0.25, 30.0
_JSON = {"content-type": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Timeouts in seconds, and retries after transient errors.

    Attributes:
        connect_s: timeout of a connection.
        first_s: timeout of the first message of a response, including the server's queue.
        between_s: timeout between two messages.
        retries: maximum number of consecutive retries without a new token.
        wait_s: maximum `Retry-After` that is followed.
    """

    connect_s: float = 10.0
    first_s: float = 600.0
    between_s: float = 120.0
    retries: int = 4
    wait_s: float = 120.0

    def pause_s(self, tries: int, retry_after_s: float | None) -> float:
        """Return the pause before the next try, after `tries` retries."""
        longest = min(_FIRST_WAIT_S * 2**tries, _MAX_WAIT_S)
        pause = longest * random.uniform(0.5, 1.0)  # so that clients do not retry at once
        return pause if retry_after_s is None else retry_after_s + pause * 0.1


class TransportError(Exception):
    """A request without a response, or with an incomplete one.

    Args:
        is_transient: a retry may succeed.
        status: status of the response; None without one.
        retry_after_s: the server's `Retry-After`.
        overflow: the error is a path that is too long.
    """

    def __init__(
        self,
        message: str,
        *,
        is_transient: bool = True,
        status: int | None = None,
        retry_after_s: float | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.status = status
        self.retry_after_s = retry_after_s
        self.overflow = overflow


def final_error(
    base: str, fault: TransportError | ProtocolError, tries: str = "", hint: str = ""
) -> WeftError:
    """Return the error of a request that is not retried any more.

    Args:
        base: address of the server.
        fault: error of the last try.
        tries: number of tries, as text for the message.
        hint: what the caller can do.
    """
    message = f"{base}: {fault}{tries}"
    if fault.overflow is None:
        return ForwardError(message, hint=hint)
    n_tokens, n_ctx = fault.overflow
    hint = "shorten the prompt or max_tokens"
    if n_ctx:
        hint += (
            f"; with n_ctx={n_ctx} (in the address: ?n_ctx={n_ctx}) texts end there by themselves"
        )
    return ContextOverflow(message, n_tokens=n_tokens, n_ctx=n_ctx, hint=hint)


class ReadTimeout(TransportError):
    """No message arrived before the timeout."""


class ConnectionLost(TransportError):
    """The connection ended before the response did."""


class Transport:
    """Requests to one server. Coroutines run on its thread; `run` and `call` submit work from
    others.

    The key is only in the client's headers, and redirects are not followed.
    """

    def __init__(
        self, address: Address, key: str | None, retry_policy: RetryPolicy, proxy: str | None = None
    ) -> None:
        self.address = address
        self.retry_policy = retry_policy
        self._secret = key or ""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            headers=headers,
            proxy=proxy,
            # NOTE: a proxy of the environment could read unencrypted requests and the key.
            trust_env=address.is_encrypted,
            # Loading the certificates takes 20 ms, and plain HTTP needs none.
            verify=address.is_encrypted,
            timeout=httpx2.Timeout(None, connect=retry_policy.connect_s),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            follow_redirects=False,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="weft-remote-http", daemon=True
        )
        self._thread.start()
        self.stop = weakref.finalize(self, _stop, self._loop, self._thread, self._client)

    def __repr__(self) -> str:
        return f"<Transport to {self.address.base}>"

    @property
    def is_closed(self) -> bool:
        """True after `stop`, and in a fork of the process that has the thread."""
        return not (self.stop.alive and self._thread.is_alive())

    # From other threads

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine on the thread and return its value."""
        if self.is_closed:
            work.close()
            raise StaleHandle("this engine is closed; load it again")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, action: Callable[[], object]) -> None:
        """Schedule a call on the thread.

        Raises:
            StaleHandle: the transport is closed.
        """
        if self.is_closed:
            raise StaleHandle("this engine is closed; load it again")
        self._loop.call_soon_threadsafe(action)

    # On the thread

    async def get(self, url: str) -> Any:
        """Return the JSON at a full URL.

        Raises:
            TransportError: the request failed.
        """
        return await self._json("GET", url, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send one request, without retries, and return the JSON of its response.

        path: below the server's address.

        Raises:
            TransportError: the request failed. `is_transient` says if a retry may succeed.
        """
        return await self._json("POST", self.address.base + path, body)

    async def _json(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        """Send a request and return the JSON of the response."""
        async with self._open(method, url, body) as response:
            async with asyncio.timeout(self.retry_policy.first_s):
                return parse_json(await _read(response, MAX_BYTES))

    async def messages(self, path: str, body: dict[str, Any]) -> AsyncGenerator[list[Any], None]:
        """Yield the messages of a streamed response, in lists of those that arrive together.

        Closing the generator closes the connection, which cancels the request on the server.

        Raises:
            TransportError: the request failed.
        """
        loop, retry_policy = asyncio.get_running_loop(), self.retry_policy
        async with self._open("POST", self.address.base + path, body) as response:
            if response.headers.get("content-type", "").startswith("application/json"):
                body_bytes = await _read(response, MAX_BYTES)  # the server does not stream
                yield [parse_json(body_bytes)]
                return
            events = EventStreamParser()
            # The timeout is reset occasionally, not for every message, so it is a tenth longer.
            pause_s = retry_policy.between_s / 10
            next_reset = 0.0
            async with asyncio.timeout(retry_policy.first_s) as limit:
                async for chunk in response.aiter_raw():
                    messages = events.feed(chunk)
                    if messages:
                        yield messages
                        now = loop.time()
                        if now >= next_reset:
                            limit.reschedule(now + retry_policy.between_s + pause_s)
                            next_reset = now + pause_s

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, body: dict[str, Any] | None
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield the response. Raises: TransportError for an error status."""
        content = None if body is None else json.dumps(body).encode()
        try:
            request = self._client.build_request(method, url, content=content, headers=_JSON)
            async with asyncio.timeout(self.retry_policy.first_s):
                response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise await self._status_error(response)
                yield response
            finally:
                await response.aclose()
        except TransportError:
            raise
        except ProtocolError as error:
            raise TransportError(str(error)) from None
        except TimeoutError:
            raise ReadTimeout("no data arrived before the timeout") from None
        except httpx2.ConnectError as error:
            raise TransportError(f"it does not answer: {error}") from None
        except httpx2.ConnectTimeout:
            raise TransportError(
                f"no connection within {self.retry_policy.connect_s:g} s"
            ) from None
        except httpx2.HTTPError as error:
            raise ConnectionLost(f"the connection broke: {error or type(error).__name__}") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise TransportError(f"the address is invalid: {error}", is_transient=False) from None

    async def _status_error(self, response: httpx2.Response) -> TransportError:
        """Return the error of a response with an error status, without the key."""
        status = response.status_code
        if response.is_redirect:
            to = response.headers.get("location", "nowhere")
            return TransportError(
                f"it redirects to {self._clean(to)}; use that address instead",
                is_transient=False,
                status=status,
            )
        async with asyncio.timeout(self.retry_policy.connect_s):
            raw = await _read(response, _MAX_ERROR_BYTES)
        overflow = None
        try:
            data = json.loads(raw)
            text, overflow = error_text(data), overflow_of(data)
        except ValueError:
            text = " ".join(raw[:200].decode(errors="replace").split())
        retry_after_s = _seconds(response.headers.get("retry-after"))
        return TransportError(
            f"it answers {status}: {self._clean(text) or response.reason_phrase}",
            is_transient=status in _BUSY
            and overflow is None
            and (retry_after_s or 0) <= self.retry_policy.wait_s,
            status=status,
            retry_after_s=retry_after_s,
            overflow=overflow,
        )

    def _clean(self, text: str) -> str:
        """Remove the API key from a text."""
        return text.replace(self._secret, "…") if self._secret else text


async def _read(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return a body up to `max_bytes`; an endless one must not fill the memory."""
    chunks, n_bytes = [], 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        n_bytes += len(chunk)
        if n_bytes > max_bytes:
            break
    return b"".join(chunks)[:max_bytes]


def _seconds(header: str | None) -> float | None:
    """Return the delay of a Retry-After header; None if it is invalid."""
    if header is None:
        return None
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max((until - datetime.now(UTC)).total_seconds(), 0.0)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; the body of the thread."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: httpx2.AsyncClient
) -> None:
    """Cancel all requests, then stop the thread."""

    async def end() -> None:
        tasks = [each for each in asyncio.all_tasks(loop) if each is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()
        loop.stop()

    if loop.is_closed() or not thread.is_alive():
        return
    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:
        thread.join(5.0)
