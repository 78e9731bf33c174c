"""The state of a server while it runs: models, looms, jobs and metrics."""

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
_LAST_S = 3.0  # seconds that cancelled jobs get to end


class Service:
    """The state of one server: its models, looms, jobs and metrics.

    `create_app` creates it; the app's lifespan calls `start` and `stop`.
    """

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
        # Called with the error when all models given at start have failed and no other is loaded.
        self.when_hopeless: Callable[[WeftError], None] | None = None
        # Called with the names of the loaded models when all models given at start have finished
        # loading and at least one is ready.
        self.when_loaded: Callable[[list[str]], None] | None = None
        self._initial_models: list[ServedModel] = []
        self._looms: LoomManager | None = None

    def open(self) -> None:
        """Open the library and register the configured models. Blocks; `start` calls it if needed.

        Raises:
            ConfigError: the engine or the database URL is invalid.
            Conflict: two models have the same name.
            StoreError: the library cannot be opened.
        """
        requests = [ModelRequest(source) for source in self.config.models]
        self._initial_models = [
            self.models.register(request, by_request=False) for request in requests
        ]
        library = Library(self.config.db, lease_s=LEASE_S)
        self._looms = LoomManager(library, self.models, self.ticker)

    async def start(self) -> None:
        """Start to load the models in the background. Raises: as `open`."""
        if self._looms is None:
            await asyncio.to_thread(self.open)
        self.looms.start()
        loads = [self.spawn(self._load(model)) for model in self._initial_models]
        self.spawn(self._report_loaded(loads))

    async def _report_loaded(self, loads: list[asyncio.Task[None]]) -> None:
        """Report the models once all loads at start have ended; stop the server if all failed."""
        if loads:
            await asyncio.wait(loads)
        loaded = [model.name for model in self._initial_models if model.lm is not None]
        if loaded and self.when_loaded is not None:
            self.when_loaded(loaded)

    async def _load(self, model: ServedModel) -> None:
        """Load one model given at start. An error is logged and stays in the registry."""
        try:
            await self.models.load(model)
        except WeftError as error:
            # A model that a client unloaded meanwhile is not registered; the server is in use then.
            is_hopeless = model in self.models and self.models.has_failed
            if not is_hopeless or self.when_hopeless is None:
                raise
            self.when_hopeless(error)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a background task, which is cancelled when the server stops.

        Its errors are logged.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """Log the error of a background task."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s", error, exc_info=None if isinstance(error, WeftError) else error)

    @property
    def n_tasks(self) -> int:
        """The number of background tasks."""
        return len(self._tasks)

    @property
    def looms(self) -> LoomManager:
        """The looms; available once the server has started."""
        assert self._looms is not None
        return self._looms

    @contextmanager
    def work(
        self, kind: str, model: str | None = None, end: Callable[[], object] | None = None
    ) -> Iterator[LM]:
        """Register the block as a job that uses a model. Yields: the model's LM.

        Long uses of a model must run in such a block. The number of jobs is limited, `stop` waits
        for them, and the model is not evicted meanwhile.

        Args:
            kind: label of the job in the metrics.
            model: name of the model; None means the default one.
            end: called to end the job early when the server stops. None cancels the task instead.

        Raises: QueueFull if too many jobs run; NotFound or RequestError if the model is not ready;
            ServerStopping if the server stops.
        """
        self.check_accepting()
        max_jobs = self.config.limits.jobs
        if len(self._works) >= max_jobs:
            raise QueueFull(f"{max_jobs} jobs are running, the maximum; try again later")
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
        """The number of blocks of `work` that are running."""
        return len(self._works)

    def check_accepting(self) -> None:
        """Raise ServerStopping if the server takes no new work."""
        if self.is_draining:
            raise ServerStopping()

    async def drain(self) -> None:
        """Reject new work, let running jobs finish for `grace_s` seconds, then cancel them.

        Ends the event streams of all looms last. Idempotent.
        """
        self.is_draining = True
        until = time.monotonic() + self.config.grace_s
        while self._works and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for end in list(self._works.values()):
            end()
        until = time.monotonic() + _LAST_S
        while self._works and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self._looms is not None:  # pages keep their streams open until the server ends them
            self._looms.end_feeds()

    async def stop(self) -> None:
        """Drain the server, cancel all background tasks, and close looms and models."""
        await self.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._looms is not None:
            await self._looms.close()
        await self.models.close()


def exit_callback(stack: ExitStack) -> Callable[[BaseException | None], None]:
    """Return a function that closes the stack.

    The function passes its argument (an error, or None) to the context managers of the stack.
    """

    def end(error: BaseException | None) -> None:
        stack.__exit__(None if error is None else type(error), error, None)

    return end


async def service_of(request: Request) -> Service:
    """Return the service of the request's app."""
    service: Service = request.app.state.service
    return service


# For arguments of routes: `service: ServiceDep`.
ServiceDep = Annotated[Service, Depends(service_of)]
