"""`Client` and `AsyncClient`: the functions of `calls` as methods, and event streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2

from ...errors import NotFound, WeftError
from ..api.jobs import JobObject, JobReply
from . import calls
from .call import RETRY_S, ApiCall, EventStreamCursor, ServerEvent, in_progress
from .connection import BROKEN, STREAM, Connection
from .growth import BranchDelta, GrowthReader

P = ParamSpec("P")
T = TypeVar("T")


def sync_method(build: Callable[P, ApiCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return a method of `Client` that builds a call with `build` and sends it.

    The method returns the result of `Client.call`.
    """

    def method(self: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return self.call(build(*args, **options))

    return update_wrapper(method, build)


def async_method(
    build: Callable[P, ApiCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method of `AsyncClient` that builds a call with `build` and sends it.

    The method returns the result of `AsyncClient.call`.
    """

    async def method(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await self.call(build(*args, **options))

    return update_wrapper(method, build)


class Client:
    """A client of a Weft server: looms, models and jobs. A context manager; thread-safe.

    Methods without a description here are the functions of `calls`; they return the parsed
    response.
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """Store the address and the key; nothing is sent yet.

        Args:
            base_url: "http://host:port"; `None` means WEFT_HOST and WEFT_PORT, else this machine.
            api_key: `None` means WEFT_API_KEY, if set.
        """
        self.connection = Connection(base_url, api_key)
        self._http = httpx2.Client(**self.connection.http_client_options())

    def call(self, call: ApiCall[T]) -> T:
        """Send a request and return its result. Raises: the library's errors; Unreachable.

        The first call verifies the server, with a timeout of 10 s. A POST whose connection breaks
        is retried once with the same idempotency key, so it is executed once.
        """
        if not self.connection.is_allowed(call):
            self.server()
        options = self.connection.request_options(call)
        with self.connection.translate_errors():
            try:
                response = self._http.request(call.method, call.path, **options)
            except BROKEN:
                if call.method != "POST":
                    raise
                response = self._http.request(call.method, call.path, **options)
                while in_progress(response.status_code, response.content):
                    time.sleep(RETRY_S)
                    response = self._http.request(call.method, call.path, **options)
        return self.connection.read(response, call)

    server = sync_method(calls.server)
    models = sync_method(calls.models)
    model = sync_method(calls.model)
    load_model = sync_method(calls.load_model)
    unload_model = sync_method(calls.unload_model)
    tokenize = sync_method(calls.tokenize)
    detokenize = sync_method(calls.detokenize)
    apply_template = sync_method(calls.apply_template)
    kv = sync_method(calls.kv)
    strategies = sync_method(calls.strategies)
    looms = sync_method(calls.looms)
    create_loom = sync_method(calls.create_loom)
    loom = sync_method(calls.loom)
    edit_loom = sync_method(calls.edit_loom)
    remove_loom = sync_method(calls.remove_loom)
    restore_looms = sync_method(calls.restore_looms)
    undo = sync_method(calls.undo)
    redo = sync_method(calls.redo)
    history = sync_method(calls.history)
    search_loom = sync_method(calls.search_loom)
    find = sync_method(calls.find)
    export = sync_method(calls.export)
    import_looms = sync_method(calls.import_looms)
    drawn_last = sync_method(calls.drawn_last)
    note_drawn = sync_method(calls.note_drawn)
    nodes = sync_method(calls.nodes)
    tree = sync_method(calls.tree)
    node = sync_method(calls.node)
    path = sync_method(calls.path)
    tokens = sync_method(calls.tokens)
    add = sync_method(calls.add)
    edit = sync_method(calls.edit)
    remove = sync_method(calls.remove)
    fork = sync_method(calls.fork)
    split = sync_method(calls.split)
    merge = sync_method(calls.merge)
    clip = sync_method(calls.clip)
    move = sync_method(calls.move)
    loom_kv = sync_method(calls.loom_kv)
    forget_kv = sync_method(calls.forget_kv)
    handle_kv = sync_method(calls.handle_kv)
    next_tokens = sync_method(calls.next_tokens)
    measure = sync_method(calls.measure)
    begin = sync_method(calls.begin)
    begin_many = sync_method(calls.begin_many)
    begin_search = sync_method(calls.begin_search)
    runs = sync_method(calls.runs)
    jobs = sync_method(calls.jobs)
    job = sync_method(calls.job)
    cancel = sync_method(calls.cancel)
    forget_job = sync_method(calls.forget_job)

    # Streams

    def grow(
        self, loom: str, node: calls.Node = 0, **options: Any
    ) -> Generator[BranchDelta, None, None]:
        """Generate branches of a node, and yield their deltas as they arrive.

        options: as for `begin`. Leaving the loop early cancels the job; generated tokens are kept.
        """
        job = self.begin(loom, node, **options)
        try:
            yield from self.deltas(job)
        finally:
            with suppress(WeftError):
                self.cancel(job.job)

    def deltas(self, job: JobReply) -> Generator[BranchDelta, None, GrowthReader]:
        """Yield the deltas of a growth job from its start.

        Returns, as the value of `yield from`, the reader with the job's `status` and `result`.
        Raises: NotFound if the server was restarted meanwhile; the message says where the text is.
        """
        reader = GrowthReader(job)
        try:
            for name, data in self.events(job.job):
                yield from reader.take(name, data)
        except NotFound as error:
            raise reader.lost(error) from error
        return reader

    def wait(self, job: str) -> JobObject:
        """Wait until a job has ended and return it. job: its id. Raises: the job's error."""
        for _ in self.events(job):
            pass
        return self.job(job)

    def events(self, job: str) -> Generator[ServerEvent, None, None]:
        """Yield the name and the data of each event of a job, until the job has ended.

        job: its id. Raises: the job's error.
        """
        return self.follow(calls.events_of(job))

    def follow(self, path: str) -> Generator[ServerEvent, None, None]:
        """Yield the name and the data of each event of a stream, to its end.

        path: the URL path of the stream. After a broken connection the stream is resumed.
        """
        if not self.connection.is_verified:
            self.server()
        cursor = EventStreamCursor(path, self.connection.base)
        while not cursor.is_over:
            error: Exception | None = None
            try:
                headers = cursor.headers
                with self._http.stream("GET", path, headers=headers, timeout=STREAM) as response:
                    if not response.is_success:
                        response.read()
                    self.connection.check(response)
                    for message in httpx2.EventSource(response):
                        yield cursor.take(message.event, message.data, message.id)
            except httpx2.TransportError as transport_error:
                error = transport_error
            if not cursor.is_over:
                time.sleep(cursor.pause_s(error))

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Like `Client`, for asyncio: its methods are coroutines. An async context manager."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """Store the address and the key, as `Client` does; nothing is sent yet."""
        self.connection = Connection(base_url, api_key)
        self._http = httpx2.AsyncClient(**self.connection.http_client_options())

    async def call(self, call: ApiCall[T]) -> T:
        """Send a request and return its result, like `Client.call`."""
        if not self.connection.is_allowed(call):
            await self.server()
        options = self.connection.request_options(call)
        with self.connection.translate_errors():
            try:
                response = await self._http.request(call.method, call.path, **options)
            except BROKEN:
                if call.method != "POST":
                    raise
                response = await self._http.request(call.method, call.path, **options)
                while in_progress(response.status_code, response.content):
                    await asyncio.sleep(RETRY_S)
                    response = await self._http.request(call.method, call.path, **options)
        return self.connection.read(response, call)

    server = async_method(calls.server)
    models = async_method(calls.models)
    model = async_method(calls.model)
    load_model = async_method(calls.load_model)
    unload_model = async_method(calls.unload_model)
    tokenize = async_method(calls.tokenize)
    detokenize = async_method(calls.detokenize)
    apply_template = async_method(calls.apply_template)
    kv = async_method(calls.kv)
    strategies = async_method(calls.strategies)
    looms = async_method(calls.looms)
    create_loom = async_method(calls.create_loom)
    loom = async_method(calls.loom)
    edit_loom = async_method(calls.edit_loom)
    remove_loom = async_method(calls.remove_loom)
    restore_looms = async_method(calls.restore_looms)
    undo = async_method(calls.undo)
    redo = async_method(calls.redo)
    history = async_method(calls.history)
    search_loom = async_method(calls.search_loom)
    find = async_method(calls.find)
    export = async_method(calls.export)
    import_looms = async_method(calls.import_looms)
    drawn_last = async_method(calls.drawn_last)
    note_drawn = async_method(calls.note_drawn)
    nodes = async_method(calls.nodes)
    tree = async_method(calls.tree)
    node = async_method(calls.node)
    path = async_method(calls.path)
    tokens = async_method(calls.tokens)
    add = async_method(calls.add)
    edit = async_method(calls.edit)
    remove = async_method(calls.remove)
    fork = async_method(calls.fork)
    split = async_method(calls.split)
    merge = async_method(calls.merge)
    clip = async_method(calls.clip)
    move = async_method(calls.move)
    loom_kv = async_method(calls.loom_kv)
    forget_kv = async_method(calls.forget_kv)
    handle_kv = async_method(calls.handle_kv)
    next_tokens = async_method(calls.next_tokens)
    measure = async_method(calls.measure)
    begin = async_method(calls.begin)
    begin_many = async_method(calls.begin_many)
    begin_search = async_method(calls.begin_search)
    runs = async_method(calls.runs)
    jobs = async_method(calls.jobs)
    job = async_method(calls.job)
    cancel = async_method(calls.cancel)
    forget_job = async_method(calls.forget_job)

    # Streams

    async def grow(
        self, loom: str, node: calls.Node = 0, **options: Any
    ) -> AsyncGenerator[BranchDelta, None]:
        """Generate branches of a node, and yield their deltas as they arrive.

        options: as for `begin`. Leaving the loop early cancels the job; generated tokens are kept.
        """
        job = await self.begin(loom, node, **options)
        try:
            async for delta in self.deltas(job):
                yield delta
        finally:
            with suppress(WeftError):
                await self.cancel(job.job)

    async def deltas(self, job: JobReply) -> AsyncGenerator[BranchDelta, None]:
        """Yield the deltas of a growth job from its start. `wait` then returns the ended job.

        Raises: as `Client.deltas`.
        """
        reader = GrowthReader(job)
        try:
            async for name, data in self.events(job.job):
                for delta in reader.take(name, data):
                    yield delta
        except NotFound as error:
            raise reader.lost(error) from error

    async def wait(self, job: str) -> JobObject:
        """Wait until a job has ended and return it. job: its id. Raises: the job's error."""
        async for _ in self.events(job):
            pass
        return await self.job(job)

    def events(self, job: str) -> AsyncGenerator[ServerEvent, None]:
        """Yield the name and the data of each event of a job, until the job has ended."""
        return self.follow(calls.events_of(job))

    async def follow(self, path: str) -> AsyncGenerator[ServerEvent, None]:
        """Yield the name and the data of each event of a stream; see `Client.follow`."""
        if not self.connection.is_verified:
            await self.server()
        cursor = EventStreamCursor(path, self.connection.base)
        while not cursor.is_over:
            error: Exception | None = None
            try:
                request = self._http.stream("GET", path, headers=cursor.headers, timeout=STREAM)
                async with request as response:
                    if not response.is_success:
                        await response.aread()
                    self.connection.check(response)
                    async for message in httpx2.EventSource(response):
                        yield cursor.take(message.event, message.data, message.id)
            except httpx2.TransportError as transport_error:
                error = transport_error
            if not cursor.is_over:
                await asyncio.sleep(cursor.pause_s(error))

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
