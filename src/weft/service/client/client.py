"""`Client` and `AsyncClient`: two thin shells over one list of calls."""

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
from .call import AGAIN_S, ApiCall, Following, Told, in_progress
from .growth import BranchDelta, GrowthReader
from .line import BROKEN, STREAM, ServerLine

P = ParamSpec("P")
T = TypeVar("T")


def asked(build: Callable[P, ApiCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return the method of `Client` that asks what `build` describes."""

    def ask(self: Client, /, *args: P.args, **options: P.kwargs) -> T:
        return self.call(build(*args, **options))

    return update_wrapper(ask, build)


def awaited(
    build: Callable[P, ApiCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return the method of `AsyncClient` that asks what `build` describes."""

    async def ask(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await self.call(build(*args, **options))

    return update_wrapper(ask, build)


class Client:
    """A server's looms, models and jobs. A context manager; thread-safe."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """Say where the server is; nothing is asked yet.

        Args:
            base_url: "http://host:port"; None: as WEFT_HOST and WEFT_PORT say, else this machine.
            api_key: None: as WEFT_API_KEY says, if it does.
        """
        self.line = ServerLine(base_url, api_key)
        self._http = httpx2.Client(**self.line.options())

    def call(self, call: ApiCall[T]) -> T:
        """Send a request and return its answer. Raises: what it would raise here; Unreachable.

        Before the first one the server is asked who it is: a silent one is known in 10 s.
        A POST whose connection breaks is sent once more, by the key of the first: it is done once.
        """
        if not self.line.may_send(call):
            self.server()
        options = self.line.asked(call)
        with self.line.told():
            try:
                response = self._http.request(call.method, call.path, **options)
            except BROKEN:
                if call.method != "POST":
                    raise
                response = self._http.request(call.method, call.path, **options)
                while in_progress(response.status_code, response.content):
                    time.sleep(AGAIN_S)
                    response = self._http.request(call.method, call.path, **options)
        return self.line.read(response, call)

    server = asked(calls.server)
    models = asked(calls.models)
    model = asked(calls.model)
    load_model = asked(calls.load_model)
    unload_model = asked(calls.unload_model)
    tokenize = asked(calls.tokenize)
    detokenize = asked(calls.detokenize)
    apply_template = asked(calls.apply_template)
    kv = asked(calls.kv)
    strategies = asked(calls.strategies)
    looms = asked(calls.looms)
    create_loom = asked(calls.create_loom)
    loom = asked(calls.loom)
    edit_loom = asked(calls.edit_loom)
    remove_loom = asked(calls.remove_loom)
    restore_looms = asked(calls.restore_looms)
    undo = asked(calls.undo)
    redo = asked(calls.redo)
    history = asked(calls.history)
    search_loom = asked(calls.search_loom)
    find = asked(calls.find)
    export = asked(calls.export)
    import_looms = asked(calls.import_looms)
    drawn_last = asked(calls.drawn_last)
    note_drawn = asked(calls.note_drawn)
    nodes = asked(calls.nodes)
    tree = asked(calls.tree)
    node = asked(calls.node)
    path = asked(calls.path)
    tokens = asked(calls.tokens)
    add = asked(calls.add)
    edit = asked(calls.edit)
    remove = asked(calls.remove)
    fork = asked(calls.fork)
    split = asked(calls.split)
    merge = asked(calls.merge)
    clip = asked(calls.clip)
    move = asked(calls.move)
    loom_kv = asked(calls.loom_kv)
    forget_kv = asked(calls.forget_kv)
    handle_kv = asked(calls.handle_kv)
    next_tokens = asked(calls.next_tokens)
    measure = asked(calls.measure)
    begin = asked(calls.begin)
    begin_many = asked(calls.begin_many)
    begin_search = asked(calls.begin_search)
    runs = asked(calls.runs)
    jobs = asked(calls.jobs)
    job = asked(calls.job)
    cancel = asked(calls.cancel)
    forget_job = asked(calls.forget_job)

    # Streams

    def grow(
        self, loom: str, node: calls.Node = 0, **options: Any
    ) -> Generator[BranchDelta, None, None]:
        """Grow branches of a node and yield what comes, as it comes; see `begin` for options.

        Leaving the loop early cancels the job; what it has is kept.
        """
        job = self.begin(loom, node, **options)
        try:
            yield from self.deltas(job)
        finally:
            with suppress(WeftError):
                self.cancel(job.job)

    def deltas(self, job: JobReply) -> Generator[BranchDelta, None, GrowthReader]:
        """Yield what a job that grows brings, from its beginning; return how it ended.

        Raises: NotFound that says where the text is, if the server was restarted meanwhile.
        """
        reader = GrowthReader(job)
        try:
            for name, told in self.events(job.job):
                yield from reader.take(name, told)
        except NotFound as error:
            raise reader.lost(error) from error
        return reader

    def wait(self, job: str) -> JobObject:
        """Return a job once it is over. Raises: what it failed with."""
        for _ in self.events(job):
            pass
        return self.job(job)

    def events(self, job: str) -> Generator[Told, None, None]:
        """Yield a job's events to its end: their names, and what they tell."""
        return self.follow(calls.events_of(job))

    def follow(self, path: str) -> Generator[Told, None, None]:
        """Yield a stream's events; one that breaks is taken up again where it was."""
        if not self.line.is_met:
            self.server()
        following = Following(path, self.line.base)
        while not following.is_over:
            error: Exception | None = None
            try:
                headers = following.headers
                with self._http.stream("GET", path, headers=headers, timeout=STREAM) as response:
                    if not response.is_success:
                        response.read()
                    self.line.check(response)
                    for each in httpx2.EventSource(response):
                        yield following.take(each.event, each.data, each.id)
            except httpx2.TransportError as found:
                error = found
            if not following.is_over:
                time.sleep(following.pause_s(error))

    def close(self) -> None:
        """Let go of the connections; idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """As `Client`, beside a running loop. An async context manager."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        """Say where the server is, as for `Client`."""
        self.line = ServerLine(base_url, api_key)
        self._http = httpx2.AsyncClient(**self.line.options())

    async def call(self, call: ApiCall[T]) -> T:
        """As `Client.call`."""
        if not self.line.may_send(call):
            await self.server()
        options = self.line.asked(call)
        with self.line.told():
            try:
                response = await self._http.request(call.method, call.path, **options)
            except BROKEN:
                if call.method != "POST":
                    raise
                response = await self._http.request(call.method, call.path, **options)
                while in_progress(response.status_code, response.content):
                    await asyncio.sleep(AGAIN_S)
                    response = await self._http.request(call.method, call.path, **options)
        return self.line.read(response, call)

    server = awaited(calls.server)
    models = awaited(calls.models)
    model = awaited(calls.model)
    load_model = awaited(calls.load_model)
    unload_model = awaited(calls.unload_model)
    tokenize = awaited(calls.tokenize)
    detokenize = awaited(calls.detokenize)
    apply_template = awaited(calls.apply_template)
    kv = awaited(calls.kv)
    strategies = awaited(calls.strategies)
    looms = awaited(calls.looms)
    create_loom = awaited(calls.create_loom)
    loom = awaited(calls.loom)
    edit_loom = awaited(calls.edit_loom)
    remove_loom = awaited(calls.remove_loom)
    restore_looms = awaited(calls.restore_looms)
    undo = awaited(calls.undo)
    redo = awaited(calls.redo)
    history = awaited(calls.history)
    search_loom = awaited(calls.search_loom)
    find = awaited(calls.find)
    export = awaited(calls.export)
    import_looms = awaited(calls.import_looms)
    drawn_last = awaited(calls.drawn_last)
    note_drawn = awaited(calls.note_drawn)
    nodes = awaited(calls.nodes)
    tree = awaited(calls.tree)
    node = awaited(calls.node)
    path = awaited(calls.path)
    tokens = awaited(calls.tokens)
    add = awaited(calls.add)
    edit = awaited(calls.edit)
    remove = awaited(calls.remove)
    fork = awaited(calls.fork)
    split = awaited(calls.split)
    merge = awaited(calls.merge)
    clip = awaited(calls.clip)
    move = awaited(calls.move)
    loom_kv = awaited(calls.loom_kv)
    forget_kv = awaited(calls.forget_kv)
    handle_kv = awaited(calls.handle_kv)
    next_tokens = awaited(calls.next_tokens)
    measure = awaited(calls.measure)
    begin = awaited(calls.begin)
    begin_many = awaited(calls.begin_many)
    begin_search = awaited(calls.begin_search)
    runs = awaited(calls.runs)
    jobs = awaited(calls.jobs)
    job = awaited(calls.job)
    cancel = awaited(calls.cancel)
    forget_job = awaited(calls.forget_job)

    # Streams

    async def grow(
        self, loom: str, node: calls.Node = 0, **options: Any
    ) -> AsyncGenerator[BranchDelta, None]:
        """Grow branches of a node and yield what comes, as it comes; see `begin` for options.

        Leaving the loop early cancels the job; what it has is kept.
        """
        job = await self.begin(loom, node, **options)
        try:
            async for delta in self.deltas(job):
                yield delta
        finally:
            with suppress(WeftError):
                await self.cancel(job.job)

    async def deltas(self, job: JobReply) -> AsyncGenerator[BranchDelta, None]:
        """Yield what a job that grows brings, from its beginning. Raises: as `Client.deltas`."""
        reader = GrowthReader(job)
        try:
            async for name, told in self.events(job.job):
                for delta in reader.take(name, told):
                    yield delta
        except NotFound as error:
            raise reader.lost(error) from error

    async def wait(self, job: str) -> JobObject:
        """Return a job once it is over. Raises: what it failed with."""
        async for _ in self.events(job):
            pass
        return await self.job(job)

    def events(self, job: str) -> AsyncGenerator[Told, None]:
        """Yield a job's events to its end: their names, and what they tell."""
        return self.follow(calls.events_of(job))

    async def follow(self, path: str) -> AsyncGenerator[Told, None]:
        """Yield a stream's events; one that breaks is taken up again where it was."""
        if not self.line.is_met:
            await self.server()
        following = Following(path, self.line.base)
        while not following.is_over:
            error: Exception | None = None
            try:
                asking = self._http.stream("GET", path, headers=following.headers, timeout=STREAM)
                async with asking as response:
                    if not response.is_success:
                        await response.aread()
                    self.line.check(response)
                    async for each in httpx2.EventSource(response):
                        yield following.take(each.event, each.data, each.id)
            except httpx2.TransportError as found:
                error = found
            if not following.is_over:
                await asyncio.sleep(following.pause_s(error))

    async def close(self) -> None:
        """Let go of the connections; idempotent."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
