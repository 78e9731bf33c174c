"""The shelf of models: one LM, and so one scheduler, for each; loaded, evicted and unloaded."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..._core.system_resources import bytes_left
from ...engines import engine_names
from ...engines.gguf import read_gguf
from ...engines.hub import EMBEDDED, SMOLLM2, gguf_file, is_gguf, resolve
from ...errors import ConfigError, Conflict, NotFound, WeftError
from ...lm.lm import LM
from ...loading import (
    display_name,
    gguf_engine,
    is_url,
    load,
    parse_bytes,
    refuse_early,
    refuse_unfit,
)
from .config import ServerConfig
from .errors import RequestError

_log = logging.getLogger(__name__)
State = Literal["loading", "ready", "evicted", "failed"]
# Called with what `weft.load` reports: phase, done, total, note. From any thread.
Progress = Callable[[str, int, int, str], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What `load` is asked for; None and "auto" as the server was started."""

    source: str
    name: str | None = None
    engine: str | None = None
    n_ctx: int | None = None
    kv_budget: str | int | None = None
    offload: str | int | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(eq=False)
class ServedModel:
    """A model on the shelf."""

    name: str
    wish: ModelRequest
    at_start: bool = False  # given when the server was started: it is never evicted
    state: State = "loading"
    lm: LM | None = None  # None unless `state` is ready
    error: WeftError | None = None  # why it could not be loaded
    before: ServedModel | None = None  # what had the name, and has it again if loading fails
    reloading: asyncio.Task[None] | None = None  # set while an evicted model is loaded again
    progress: tuple[str, int, int] = ("load", 0, 1)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    n_users: int = 0
    n_bytes: int = 0  # of weights and KV budget

    @property
    def source(self) -> str:
        """What was loaded."""
        return self.wish.source

    @property
    def is_evictable(self) -> bool:
        """Whether it may be unloaded now to make room."""
        return self.lm is not None and not self.at_start and not self.n_users

    @contextmanager
    def in_use(self) -> Iterator[LM]:
        """Keep the model from being unloaded for others meanwhile; gives its LM."""
        lm = self.ready()
        self.n_users += 1
        try:
            yield lm
        finally:
            self.n_users -= 1
            self.used = time.monotonic()

    def ready(self) -> LM:
        """Return the LM. Raises: Refused while it loads; NotFound, or the error of its start."""
        if self.lm is not None:
            return self.lm
        if self.error is not None and self.at_start:
            raise self.error
        if self.error is not None:
            raise NotFound(
                f"model {self.name!r} is not loaded: the last request to load it failed",
                what="model",
                hint="GET /api/v1/models has the reason; POST /api/v1/models loads it",
            )
        phase, done, total = self.progress
        raise RequestError(
            503,
            "model_loading",
            f"model {self.name!r} is being loaded: {phase} {100 * done // max(total, 1)} %",
            details={"phase": phase, "done": done, "total": total},
        )


class ModelRegistry:
    """The models by their names; used from the event loop only.

    A request loads only what the configuration allows. Where models exceed the maximum number or
    the memory budget, the shelf evicts the least recently used ones that requests have loaded, but
    none in use. `available` loads an evicted model again.
    """

    def __init__(self, config: ServerConfig, spawn: Spawn) -> None:
        """spawn: starts a task that ends with the server."""
        self.config = config
        self.default: str | None = None
        self._spawn = spawn
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def is_ready(self) -> bool:
        """Whether there is a model that can be used."""
        return any(model.lm is not None for model in self)

    @property
    def has_failed(self) -> bool:
        """Whether no model can be used, and none is being loaded."""
        return all(model.state == "failed" for model in self)

    def get(self, name: str | None = None) -> ServedModel:
        """Return a model; None is the default. Raises: NotFound, naming those there are."""
        wanted = self.default if name is None else name
        model = None if wanted is None else self._models.get(wanted)
        if model is not None:
            return model
        known = ", ".join(self._models) or "none"
        if name is None:
            raise NotFound(f"no model is loaded; known are: {known}", what="model")
        raise NotFound(f"there is no model {name!r:.200} here; known are: {known}", what="model")

    def lm(self, name: str | None = None) -> LM:
        """Return a model's LM. Raises: NotFound; Refused (503) while it is being loaded."""
        return self.get(name).ready()

    def name_of(self, lm: LM) -> str:
        """Return the name of the model whose LM this is. Raises: NotFound for one that is gone."""
        for model in self:
            if model.lm is lm:
                return model.name
        raise NotFound("the model was unloaded meanwhile", what="model")

    async def available(self, name: str | None = None) -> ServedModel:
        """Return a model; load it again first if it was evicted.

        Raises: NotFound; Refused where there is no room for it; as `weft.load`.
        """
        model = self.get(name)
        model.used = time.monotonic()
        if model.state == "evicted":
            model.state, model.progress = "loading", ("load", 0, 1)
            model.reloading = self._spawn(self.finish(model))
        if model.reloading is not None:
            await asyncio.shield(model.reloading)
        return model

    def begin(self, wish: ModelRequest, *, by_request: bool = True) -> ServedModel:
        """Put a model on the shelf that is yet to be loaded; `finish` loads it.

        Raises: Refused for a source that is not allowed, Conflict for a name that is taken.
        """
        if by_request:
            self.check_source(wish.source)
        engine = wish.engine or self.config.engine
        if engine not in (known := ("auto", *engine_names())):
            raise ConfigError(f"engine is {engine!r:.80}; allowed are {', '.join(known)}")
        name = wish.name or display_name(wish.source)
        there = self._models.get(name)
        if there is not None and there.state in ("loading", "ready"):
            raise Conflict(
                f"there is a model {name!r} already, of {display_name(there.source)}",
                code="name_taken",
                hint="unload it first, or load this one under another name",
            )
        model = self._models[name] = ServedModel(name, wish, not by_request, before=there)
        self.default = self.default or name
        return model

    async def finish(self, model: ServedModel, progress: Progress | None = None) -> None:
        """Load a model that `begin` put here; it can be used afterwards. Raises: as `weft.load`."""

        def tell(phase: str, done: int, total: int, note: str) -> None:
            model.progress = (phase, done, total)
            if progress is not None:
                progress(phase, done, total, note)

        async with self._loading:
            try:
                lm = await self._loaded(model, tell)
            except BaseException as error:
                self._failed(model, error)
                raise
            if self._models.get(model.name) is not model:  # it was unloaded meanwhile
                await asyncio.to_thread(lm.close)
                raise Conflict(
                    f"model {model.name!r} was unloaded while it was being loaded",
                    code="model_unloaded",
                )
            model.n_bytes += kv_bytes(lm)
            model.lm, model.state = lm, "ready"
            model.before = model.reloading = None
            if self.default is None or self._models[self.default].state == "failed":
                self.default = model.name
        _log.info("model %s is loaded, on the %s engine", model.name, lm.info.name)
        _warn_of_budget(model.name, lm)

    def _failed(self, model: ServedModel, error: BaseException) -> None:
        """Put back what had the model's name, or note the error. Raises: WeftError for others."""
        if model.reloading is not None:
            model.state, model.reloading = "evicted", None
        elif model.before is not None and self._models.get(model.name) is model:
            self._models[model.name] = model.before
        elif isinstance(error, Exception):
            model.state, model.error = "failed", _as_ours(error)
        else:
            self._forget(model)
        if isinstance(error, Exception):
            raise _as_ours(error) from error.__cause__

    def _weights_bytes(self, wish: ModelRequest, tell: Progress) -> int:
        """Read the header of a model; return the size of its weights. Raises: as `weft.load`."""
        files = checked_files(wish.source, wish.engine or self.config.engine, wish.device, tell)
        return 0 if files is None else weights_bytes(files)

    def _budget_bytes(self, wish: ModelRequest) -> int:
        """Return the KV that a model may take on device and host; 0 for "auto", which adapts."""
        budget = self.config.kv_budget if wish.kv_budget is None else wish.kv_budget
        offload = self.config.offload if wish.offload is None else wish.offload
        n_host = 0 if offload is None else parse_bytes(offload, "offload", auto=False) or 0
        return (parse_bytes(budget) or 0) + n_host

    def _load(self, wish: ModelRequest, tell: Progress) -> LM:
        own = self.config
        options = own.engine_options if wish.source in own.models else {}
        return load(
            wish.source,
            engine=wish.engine or own.engine,
            n_ctx=wish.n_ctx or own.n_ctx,
            kv_budget=own.kv_budget if wish.kv_budget is None else wish.kv_budget,
            offload=own.offload if wish.offload is None else wish.offload,
            device=wish.device,
            dtype=wish.dtype,
            chat_template=own.chat_template if wish.source in own.models[:1] else None,
            engine_options=dict(options) or None,
            progress=tell,
        )

    async def unload(self, name: str, *, force: bool = False) -> None:
        """Close a model and forget it. Raises: NotFound; Conflict while somebody uses it."""
        model = self.get(name)
        if model.n_users and not force:
            raise Conflict(
                f"model {name!r} is in use by {model.n_users} jobs",
                code="model_in_use",
                hint="cancel them, or unload it with force",
            )
        self._forget(model)
        if model.lm is not None:
            await asyncio.to_thread(model.lm.close)

    def _forget(self, model: ServedModel) -> None:
        if self._models.get(model.name) is model:
            del self._models[model.name]
        if self.default == model.name:
            self.default = next(iter(self._models), None)

    async def _loaded(self, new: ServedModel, tell: Progress) -> LM:
        """Load a model and evict others: after the load if memory suffices, so that a load that
        fails evicts nothing.

        Raises: Refused where there is no room; as `weft.load`.
        """
        new.n_bytes = await asyncio.to_thread(self._weights_bytes, new.wish, tell)
        n_bytes = new.n_bytes + self._budget_bytes(new.wish)
        evicted = self._to_evict(new, n_bytes)
        if evicted and not self._fits_now(n_bytes):
            if not _fits_machine(evicted, n_bytes):
                raise self._no_room(new, n_bytes)
            await self._evict(evicted, new)
        lm = await asyncio.to_thread(self._load, new.wish, tell)
        try:
            await self._evict(self._to_evict(new, n_bytes), new)
        except BaseException:
            await asyncio.to_thread(lm.close)
            raise
        return lm

    def _to_evict(self, new: ServedModel, n_bytes: int) -> list[ServedModel]:
        """Return the idle models without which one of `n_bytes` fits. Raises: Refused."""
        loaded = [model for model in self if model.lm is not None]
        idle = sorted((each for each in loaded if each.is_evictable), key=lambda each: each.used)
        evicted: list[ServedModel] = []
        while not self._has_room(loaded, evicted, n_bytes):
            if not idle:
                raise self._no_room(new, n_bytes)
            evicted.append(idle.pop(0))
        return evicted

    async def _evict(self, models: list[ServedModel], new: ServedModel) -> None:
        lms = [model.lm for model in models if model.lm is not None]
        for model in models:
            _log.warning("model %s is evicted to make room for %s", model.name, new.name)
            model.lm, model.state = None, "evicted"
        for lm in lms:
            await asyncio.to_thread(lm.close)

    def _fits_now(self, n_bytes: int) -> bool:
        """Return True if a model of `n_bytes` is known to fit before any eviction."""
        loaded = [model for model in self if model.lm is not None]
        budget, left = self.config.memory_budget, bytes_left()
        if budget is not None and sum(model.n_bytes for model in loaded) + n_bytes > budget:
            return False
        return left is not None and n_bytes <= left and all(map(_is_on_cpu, loaded))

    def _has_room(
        self, loaded: list[ServedModel], evicted: list[ServedModel], n_bytes: int
    ) -> bool:
        """Return True if one more model of `n_bytes` is within the configured limits."""
        left = [model for model in loaded if model not in evicted]
        budget = self.config.memory_budget
        is_in_budget = budget is None or sum(each.n_bytes for each in left) + n_bytes <= budget
        return is_in_budget and len(left) < self.config.model_limit

    def _no_room(self, new: ServedModel, n_bytes: int) -> RequestError:
        return RequestError(
            503,
            "out_of_memory",
            f"there is no room for model {new.name!r} of {n_bytes >> 20} MiB, even without the idle"
            " models that requests have loaded",
            hint="unload a model, or start the server with a larger --max-models or"
            " --memory-budget",
            details={
                "needed_bytes": n_bytes,
                "taken_bytes": sum(model.n_bytes for model in self if model.lm is not None),
                "budget_bytes": self.config.memory_budget,
                "max_models": self.config.model_limit,
            },
        )

    def check_source(self, source: str) -> None:
        """Refuse what may not be loaded by request: anything but what the configuration allows.

        A path is refused alike whether or not something is there. Raises: Refused.
        """
        if source in self.config.models or source in (EMBEDDED, SMOLLM2):
            return
        if is_url(source):
            raise _not_allowed("addresses of other servers are given when the server is started")
        if is_path(source):
            if not is_below(source, self.config.model_roots):
                raise _not_allowed("that path is not below a folder given with --model-root")
        elif not self.config.hub:
            raise _not_allowed("models of the Hub may be loaded only with --allow-hub")

    async def close(self) -> None:
        """Close all models; idempotent."""
        for model in self:
            self._forget(model)
            if model.lm is not None:
                await asyncio.to_thread(model.lm.close)


def _not_allowed(why: str) -> RequestError:
    return RequestError(403, "model_not_allowed", f"this model may not be loaded here: {why}")


def is_path(source: str) -> bool:
    """Whether a source means a file or folder: by how it is written, or as there is one."""
    looks_so = source.startswith((".", "/", "~", "\\")) or "\\" in source or "\x00" in source
    parts = source.partition("@")[0].split("/")
    # A Hub id is org/name, or a name; a drive of Windows has a colon.
    is_id = len(parts) <= 2 and all(parts) and ":" not in source and ".." not in parts
    return looks_so or not is_id or source.lower().endswith(".gguf") or _is_there(source)


def _is_there(source: str) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long for a path, say
        return True


def is_below(path: str | os.PathLike[str], roots: tuple[Path, ...]) -> bool:
    """Whether a path, links followed, is one of these folders or below one."""
    try:
        real = Path(path).expanduser().resolve()
        return any(real.is_relative_to(root.expanduser().resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        return False


def checked_files(source: str, engine: str, device: str, progress: Progress) -> Path | None:
    """Return a model's file or folder after reading its header; None for another server's.

    Reads no weights, but downloads a Hub model. Raises: as `weft.load`, for a model that is
    missing, broken or not for the engine.
    """
    if is_url(source):
        return None
    refuse_unfit(engine, source)
    if is_gguf(source):
        file = gguf_file(source)
        read_gguf(file)
        gguf_engine(source, engine, device)
        return file
    check = partial(refuse_early, source, engine)
    folder = resolve(source, suits=check, progress=progress)
    check(folder)
    return folder


def _fits_machine(evicted: list[ServedModel], n_bytes: int) -> bool:
    """Return False if a model is known to need more memory than evicting others frees.

    Only models on the CPU free memory of a known amount.
    """
    left = bytes_left()
    if left is None or not all(map(_is_on_cpu, evicted)):
        return True
    return n_bytes <= left + sum(each.n_bytes for each in evicted)


def _is_on_cpu(model: ServedModel) -> bool:
    return model.lm is not None and model.lm.info.device == "cpu"


def weights_bytes(path: Path) -> int:
    """Return the size of a model's file, or of the weights in its folder."""
    files = [path] if path.is_file() else path.rglob("*")
    kinds = (".safetensors", ".gguf", ".bin", ".npz")
    return sum(each.stat().st_size for each in files if each.suffix in kinds)


def kv_bytes(lm: LM) -> int:
    """Return how many bytes an LM's KV may take, on the host, too; 0 where nobody knows."""
    slots = (lm.tree.room.capacity or 0) + lm.tree.host.capacity
    return slots * lm.info.kv_bytes_per_token


def _warn_of_budget(name: str, lm: LM) -> None:
    """Say in the log that paths of a length that the context takes will be refused."""
    slots = lm.tree.room.capacity
    if slots is not None and slots < lm.n_ctx:
        n_bytes = lm.n_ctx * lm.info.kv_bytes_per_token
        _log.warning(
            "model %s: its KV budget has %d slots and its context %d tokens; longer paths than the"
            " budget are refused. Give --kv-budget %dKiB or more, or --n-ctx %d",
            name, slots, lm.n_ctx, -(-n_bytes // 1024), slots,
        )  # fmt: skip


def _as_ours(error: Exception) -> WeftError:
    if isinstance(error, WeftError):
        return error
    wrapped = WeftError(f"the model could not be loaded: {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
