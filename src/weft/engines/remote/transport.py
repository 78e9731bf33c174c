"""HTTP to one server, on its own thread: retries, errors, and the API key."""

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
from .responses import MOST_BYTES, Events, Overflow, ProtocolError, error_text, overflow_of, parsed

Value = TypeVar("Value")
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_SAID = 1 << 16  # bytes of an error that are read
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
_JSON = {"content-type": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait, in seconds, and how often to try again after a fault.

    connect_s: for a connection. first_s: for the first message of an answer, queueing over there
    included. between_s: between two messages. retries: in a row, without a new token.
    wait_s: a server that asks to be left alone for longer is not waited for.
    """

    connect_s: float = 10.0
    first_s: float = 600.0
    between_s: float = 120.0
    retries: int = 4
    wait_s: float = 120.0

    def pause_s(self, tries: int, asked_s: float | None) -> float:
        """Return how long to wait before the next try; `tries` were made."""
        longest = min(_FIRST_WAIT_S * 2**tries, _LONGEST_WAIT_S)
        pause = longest * random.uniform(0.5, 1.0)  # or all would come back at once
        return pause if asked_s is None else asked_s + pause * 0.1


class TransportError(Exception):
    """A request that brought no answer, or not all of it.

    may_pass: it may be otherwise next time. status: of the answer; None without one. asked_s: how
    long the server asks to be left alone. overflow: a path is too long for it.
    """

    def __init__(
        self,
        message: str,
        *,
        may_pass: bool = True,
        status: int | None = None,
        asked_s: float | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        self.status = status
        self.asked_s = asked_s
        self.overflow = overflow


def give_up_error(
    base: str, fault: TransportError | ProtocolError, often: str = "", hint: str = ""
) -> WeftError:
    """Return the error of a request that nobody tries again."""
    message = f"{base}: {fault}{often}"
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
    """Nothing came for as long as somebody was to wait."""


class ConnectionLost(TransportError):
    """The connection ended before the answer did."""


class Transport:
    """Requests to one server. Coroutines run on its thread; `run` and `spawn` bring them there.

    The key stands in the client's headers and nowhere else; no answer leads to another host.
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
            # NOTE: a proxy of the environment may read what is not encrypted, the key included.
            trust_env=address.is_encrypted,
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
        return f"<Wire to {self.address.base}>"

    @property
    def is_closed(self) -> bool:
        """`stop` was called, or this is a fork of the process that has the thread."""
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
        """Call something on the thread, soon. Raises: StaleHandle once closed."""
        if self.is_closed:
            raise StaleHandle("this engine is closed; load it again")
        self._loop.call_soon_threadsafe(action)

    # On the thread

    async def get(self, url: str) -> Any:
        """Return the JSON at a whole address. Raises: Fault."""
        return await self._whole("GET", url, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that answers a request. Raises: Fault."""
        return await self._whole("POST", self.address.base + path, body)

    async def _whole(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        async with self._open(method, url, body) as response:
            async with asyncio.timeout(self.retry_policy.first_s):
                return parsed(await _read(response, MOST_BYTES))

    async def messages(self, path: str, body: dict[str, Any]) -> AsyncGenerator[list[Any], None]:
        """Yield the messages that answer a request, as many at once as come. Raises: Fault.

        Close it to break the answer off; the server hears of that.
        """
        loop, retry_policy = asyncio.get_running_loop(), self.retry_policy
        async with self._open("POST", self.address.base + path, body) as response:
            if response.headers.get("content-type", "").startswith("application/json"):
                whole = await _read(response, MOST_BYTES)  # it does not stream: all at once
                yield [parsed(whole)]
                return
            events = Events()
            # A timer is set anew now and then, not for every message; so it waits a tenth longer.
            pause_s = retry_policy.between_s / 10
            again = 0.0
            async with asyncio.timeout(retry_policy.first_s) as limit:
                async for chunk in response.aiter_raw():
                    found = events.take(chunk)
                    if found:
                        yield found
                        now = loop.time()
                        if now >= again:
                            limit.reschedule(now + retry_policy.between_s + pause_s)
                            again = now + pause_s

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, body: dict[str, Any] | None
    ) -> AsyncIterator[httpx2.Response]:
        content = None if body is None else json.dumps(body).encode()
        try:
            request = self._client.build_request(method, url, content=content, headers=_JSON)
            async with asyncio.timeout(self.retry_policy.first_s):
                response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise await self._refused(response)
                yield response
            finally:
                await response.aclose()
        except TransportError:
            raise
        except ProtocolError as error:
            raise TransportError(str(error)) from None
        except TimeoutError:
            raise ReadTimeout("it does not go on: nothing came for too long") from None
        except httpx2.ConnectError as error:
            raise TransportError(f"it does not answer: {error}") from None
        except httpx2.ConnectTimeout:
            raise TransportError(
                f"no connection within {self.retry_policy.connect_s:g} s"
            ) from None
        except httpx2.HTTPError as error:
            raise ConnectionLost(f"the connection broke: {error or type(error).__name__}") from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise TransportError(f"the address cannot be asked: {error}", may_pass=False) from None

    async def _refused(self, response: httpx2.Response) -> TransportError:
        """Return what to say of an answer that is none; the key is in no word of it."""
        status = response.status_code
        if response.is_redirect:
            to = response.headers.get("location", "nowhere")
            return TransportError(
                f"it sends requests on to {self._clean(to)}; give that address instead",
                may_pass=False,
                status=status,
            )
        async with asyncio.timeout(self.retry_policy.connect_s):
            raw = await _read(response, _MOST_SAID)
        overflow = None
        try:
            data = json.loads(raw)
            said, overflow = error_text(data), overflow_of(data)
        except ValueError:
            said = " ".join(raw[:200].decode(errors="replace").split())
        asked_s = _seconds(response.headers.get("retry-after"))
        return TransportError(
            f"it answers {status}: {self._clean(said) or response.reason_phrase}",
            may_pass=status in _BUSY
            and overflow is None
            and (asked_s or 0) <= self.retry_policy.wait_s,
            status=status,
            asked_s=asked_s,
            overflow=overflow,
        )

    def _clean(self, text: str) -> str:
        return text.replace(self._secret, "…") if self._secret else text


async def _read(response: httpx2.Response, most: int) -> bytes:
    """Return a body, as far as it goes and is read: an endless one must not fill the memory."""
    found, n_bytes = [], 0
    async for chunk in response.aiter_bytes():
        found.append(chunk)
        n_bytes += len(chunk)
        if n_bytes > most:
            break
    return b"".join(found)[:most]


def _seconds(header: str | None) -> float | None:
    """Return what a Retry-After header asks for; None for none that can be read."""
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
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: httpx2.AsyncClient
) -> None:
    """End all requests, then the thread."""

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
