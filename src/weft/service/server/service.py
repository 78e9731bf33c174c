"""What a server holds while it runs: its models and its metrics; the routes ask it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Annotated, Any

from fastapi import Depends, Request

from ...errors import Cancelled, QueueFull, WeftError
from ...lm.lm import LM
from ..store.library import Library
from .config import ServerConfig
from .jobs import JobRegistry
from .loom_manager import LEASE_S, LoomManager
from .metrics import ServerMetrics
from .models import ModelRegistry, ModelRequest, ServedModel
from .shutdown import CancelScope, ServerStopping
from .ticker import Ticker

_log = logging.getLogger(__name__)
_LAST_S = 3.0  # for jobs that were told to end


class Service:
    """One server's state; made with the app, started and stopped by its lifespan."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        # Accepted in place of the API key; commands of the same user read it from a file.
        self.token = secrets.token_urlsafe(32)
        self.models = ModelRegistry(config, self.spawn)
        self.metrics = ServerMetrics(self.models)
        self.ticker = Ticker()
        self.is_draining = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._works: dict[object, Callable[[], object]] = {}
        self.jobs = JobRegistry(config.limits.kept_jobs)
        # Called with why, once all models of the start have failed and no other one is there.
        self.when_hopeless: Callable[[WeftError], None] | None = None
        # Called with the names of the loaded models, once every model of the start has ended
        # loading and at least one of them is ready.
        self.when_loaded: Callable[[list[str]], None] | None = None
        self._begun: list[ServedModel] = []
        self._looms: LoomManager | None = None

    def open(self) -> None:
        """Open the looms, and put the models on the shelf that are to be loaded. Blocks.

        Where nobody did so before, `start` does. Raises: ConfigError for an engine or a database
        that is none, Conflict for two models of one name, StoreError where the looms cannot be
        opened.
        """
        wishes = [ModelRequest(source) for source in self.config.models]
        self._begun = [self.models.begin(wish, by_request=False) for wish in wishes]
        library = Library(self.config.db, lease_s=LEASE_S)
        self._looms = LoomManager(library, self.models, self.ticker)

    async def start(self) -> None:
        """Begin to load the models; requests are answered meanwhile. Raises: as `open`."""
        if self._looms is None:
            await asyncio.to_thread(self.open)
        self.looms.start()
        loads = [self.spawn(self._load(model)) for model in self._begun]
        self.spawn(self._report(loads))

    async def _report(self, loads: list[asyncio.Task[None]]) -> None:
        if loads:
            await asyncio.wait(loads)
        loaded = [model.name for model in self._begun if model.lm is not None]
        if loaded and self.when_loaded is not None:
            self.when_loaded(loaded)

    async def _load(self, model: ServedModel) -> None:
        try:
            await self.models.finish(model)
        except WeftError as error:
            # One that was unloaded meanwhile is not on the shelf: somebody is there, who did it.
            is_hopeless = model in self.models and self.models.has_failed
            if not is_hopeless or self.when_hopeless is None:
                raise
            self.when_hopeless(error)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the requests; its errors are logged, it ends with the server."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s", error, exc_info=None if isinstance(error, WeftError) else error)

    @property
    def n_tasks(self) -> int:
        """How many things run beside the requests."""
        return len(self._tasks)

    @property
    def looms(self) -> LoomManager:
        """The looms; there once the server has started."""
        assert self._looms is not None
        return self._looms

    @contextmanager
    def work(
        self, kind: str, model: str | None = None, end: Callable[[], object] | None = None
    ) -> Iterator[LM]:
        """Be one of the jobs that run, on a model; gives its LM.

        Every call that runs a model for longer than a moment stands in it, to its end: what is
        counted here is limited, waited for when the server stops, and keeps its model loaded.
        kind: for the metrics. end: ends it early, where the server stops; None cancels the task,
        for which Refused is raised. Raises: QueueFull; NotFound or Refused for the model.
        """
        self.check_accepting()
        most = self.config.limits.jobs
        if len(self._works) >= most:
            raise QueueFull(f"{most} jobs are running here; try again in a moment")
        with self.models.get(model).in_use() as lm:
            token = object()
            ending = CancelScope()
            self._works[token] = end or ending
            self.metrics.running.set(len(self._works))
            status = "ok"
            try:
                with nullcontext() if end else ending.scope():
                    yield lm
            except (asyncio.CancelledError, GeneratorExit, Cancelled, ServerStopping):
                status = "cancelled"
                raise
            except BaseException:
                status = "failed"
                raise
            finally:
                del self._works[token]
                self.metrics.running.set(len(self._works))
                self.metrics.jobs.labels(kind, status).inc()

    @property
    def n_works(self) -> int:
        """How many jobs run."""
        return len(self._works)

    def check_accepting(self) -> None:
        """Raise Refused where no new work is taken: the server is about to stop."""
        if self.is_draining:
            raise ServerStopping()

    async def drain(self) -> None:
        """Take no new work; give what runs its time, then end it. Idempotent."""
        self.is_draining = True
        until = time.monotonic() + self.config.grace_s
        while self._works and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for end in list(self._works.values()):
            end()
        until = time.monotonic() + _LAST_S
        while self._works and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self._looms is not None:  # pages listen for as long as they are let
            self._looms.end_feeds()

    async def stop(self) -> None:
        """End everything and close the models."""
        await self.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._looms is not None:
            await self._looms.close()
        await self.models.close()


def exit_callback(stack: ExitStack) -> Callable[[BaseException | None], None]:
    """Return what closes a stack, telling its contexts why; nothing is raised again."""

    def end(error: BaseException | None) -> None:
        stack.__exit__(None if error is None else type(error), error, None)

    return end


async def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to."""
    service: Service = request.app.state.service
    return service


# As an argument of a route: `service: Here`.
ServiceDep = Annotated[Service, Depends(service_of)]
