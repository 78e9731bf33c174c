"""The registry of models: loads, evicts and unloads them. Each has its own LM and scheduler."""

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
from ..._core.validation import check_choice
from ...engines import engine_names
from ...engines.gguf import read_gguf
from ...engines.hub import EMBEDDED, SMOLLM2, gguf_file, is_gguf, resolve
from ...errors import Conflict, NotFound, WeftError
from ...lm.lm import LM
from ...loading import (
    check_engine_fits,
    check_model_supported,
    display_name,
    gguf_engine,
    is_url,
    load,
    parse_bytes,
)
from .config import ServerConfig
from .errors import RequestError

_log = logging.getLogger(__name__)
# The dtypes that any engine can load a model in.
_DTYPES = ("auto", "float32", "bfloat16", "float16")
State = Literal["loading", "ready", "evicted", "failed"]
# Called from any thread with the progress of `weft.load`: phase, done, total, note.
Progress = Callable[[str, int, int, str], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model to load. None and "auto" mean the setting of the server's own configuration.

    source: path, Hub id or URL. Other fields are named as in `weft.load`.
    """

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
    """A model in the registry, whether it is loading, ready, evicted or failed."""

    name: str
    request: ModelRequest
    at_start: bool = False  # configured at server start: never evicted
    state: State = "loading"
    lm: LM | None = None  # None unless `state` is ready
    error: WeftError | None = None  # why loading failed
    previous: ServedModel | None = (
        None  # the model with this name before; restored if loading fails
    )
    reloading: asyncio.Task[None] | None = None  # set while an evicted model is loaded again
    progress: tuple[str, int, int] = ("load", 0, 1)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    n_users: int = 0
    n_bytes: int = 0  # weights and KV budget

    @property
    def source(self) -> str:
        """The path, Hub id or URL it is loaded from."""
        return self.request.source

    @property
    def is_evictable(self) -> bool:
        """True if it may be unloaded now to make room."""
        return self.lm is not None and not self.at_start and not self.n_users

    @contextmanager
    def in_use(self) -> Iterator[LM]:
        """Protect the model from eviction while the block runs.

        Yields: its LM. Raises: as `ready`.
        """
        lm = self.ready()
        self.n_users += 1
        try:
            yield lm
        finally:
            self.n_users -= 1
            self.used = time.monotonic()

    def ready(self) -> LM:
        """Return the LM if the model is loaded.

        Raises:
            RequestError: the model is being loaded.
            NotFound: a request has tried to load it, and that has failed.
            WeftError: the load error of a model that was given at server start.
        """
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
    """The models by name; used from the event loop only.

    Requests load only what the configuration allows. If models exceed the maximum number or the
    memory budget, the registry evicts the least recently used idle ones that requests have loaded.
    `available` reloads an evicted model.

    Args:
    spawn: starts a task that is cancelled when the server stops.
    """

    def __init__(self, config: ServerConfig, spawn: Spawn) -> None:
        self.config = config
        self.default: str | None = None
        self._spawn = spawn
        self._models: dict[str, ServedModel] = {}
        self._loading = asyncio.Lock()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def is_ready(self) -> bool:
        """True if a model can be used."""
        return any(model.lm is not None for model in self)

    @property
    def has_failed(self) -> bool:
        """True if every model failed to load."""
        return all(model.state == "failed" for model in self)

    def get(self, name: str | None = None) -> ServedModel:
        """Return a model; None is the default one.

        Raises: NotFound, which lists the available ones.
        """
        wanted = self.default if name is None else name
        model = None if wanted is None else self._models.get(wanted)
        if model is not None:
            return model
        names = ", ".join(self._models) or "none"
        if name is None:
            raise NotFound(f"no model is loaded; registered models: {names}", what="model")
        raise NotFound(f"no model {name!r:.200} on this server; available: {names}", what="model")

    def lm(self, name: str | None = None) -> LM:
        """Return the LM of a model; None is the default one. Raises: as `ServedModel.ready`."""
        return self.get(name).ready()

    def name_of(self, lm: LM) -> str:
        """Return the name of the model with this LM. Raises: NotFound if it was unloaded."""
        for model in self:
            if model.lm is lm:
                return model.name
        raise NotFound("the model was unloaded meanwhile", what="model")

    async def available(self, name: str | None = None) -> ServedModel:
        """Return a model; reload it first if it was evicted.

        Raises: NotFound; RequestError if there is no room for it; as `weft.load`.
        """
        model = self.get(name)
        model.used = time.monotonic()
        if model.state == "evicted":
            model.state, model.progress = "loading", ("load", 0, 1)
            model.reloading = self._spawn(self.load(model))
        if model.reloading is not None:
            await asyncio.shield(model.reloading)
        return model

    def register(self, request: ModelRequest, *, by_request: bool = True) -> ServedModel:
        """Add a model to the registry in the state "loading"; `load` must follow.

        by_request: a request has sent it, so that its source must be allowed.
        Raises: RequestError for a source that is not allowed, ConfigError for a setting that no
        engine has, Conflict for a name in use.
        """
        if by_request:
            self.check_source(request.source)
        engine = request.engine or self.config.engine
        check_choice("engine", engine, ("auto", *engine_names()))
        check_choice("dtype", request.dtype, _DTYPES)
        self._budget_bytes(request)
        name = request.name or display_name(request.source)
        existing = self._models.get(name)
        if existing is not None and existing.state in ("loading", "ready"):
            raise Conflict(
                f"model {name!r} already exists, loaded from {display_name(existing.source)}",
                code="name_taken",
                hint="unload it first, or load this one under another name",
            )
        model = self._models[name] = ServedModel(name, request, not by_request, previous=existing)
        self.default = self.default or name
        return model

    async def load(self, model: ServedModel, progress: Progress | None = None) -> None:
        """Load a registered model. progress: called with the progress; None reports none.

        Raises: as `weft.load`.
        """

        def report(phase: str, done: int, total: int, note: str) -> None:
            model.progress = (phase, done, total)
            if progress is not None:
                progress(phase, done, total, note)

        async with self._loading:
            try:
                lm = await self._load_and_evict(model, report)
            except BaseException as error:
                self._handle_failure(model, error)
                raise
            if self._models.get(model.name) is not model:  # unloaded meanwhile
                await asyncio.to_thread(lm.close)
                raise Conflict(
                    f"model {model.name!r} was unloaded while it was being loaded",
                    code="model_unloaded",
                )
            model.n_bytes += kv_bytes(lm)
            model.lm, model.state = lm, "ready"
            model.previous = model.reloading = None
            if self.default is None or self._models[self.default].state == "failed":
                self.default = model.name
        _log.info("loaded model %s on the %s engine", model.name, lm.info.name)
        _warn_of_budget(model.name, lm)

    def _handle_failure(self, model: ServedModel, error: BaseException) -> None:
        """Update the registry after loading a model has failed or was cancelled.

        An evicted model that was being reloaded is evicted again. A model that replaces another one
        of its name gives the name back. Any other model is marked as failed.

        Raises: WeftError, if `error` is an exception and not a cancellation.
        """
        if model.reloading is not None:
            model.state, model.reloading = "evicted", None
        elif model.previous is not None and self._models.get(model.name) is model:
            self._models[model.name] = model.previous
        elif isinstance(error, Exception):
            model.state, model.error = "failed", _as_weft_error(error)
        else:
            self._remove(model)
        if isinstance(error, Exception):
            raise _as_weft_error(error) from error.__cause__

    def _weights_bytes(self, request: ModelRequest, progress: Progress) -> int:
        """Read the header of a model to be loaded, and return the bytes of its weights.

        0 for a URL of another server. progress: called with the progress of a download.
        Raises: as `weft.load`.
        """
        files = checked_files(
            request.source, request.engine or self.config.engine, request.device, progress
        )
        return 0 if files is None else weights_bytes(files)

    def _budget_bytes(self, request: ModelRequest) -> int:
        """Return the requested KV budget, on device and host, in bytes.

        0 for "auto", which adapts to free memory.
        """
        budget = self.config.kv_budget if request.kv_budget is None else request.kv_budget
        offload = self.config.offload if request.offload is None else request.offload
        n_host = 0 if offload is None else parse_bytes(offload, "offload", auto=False) or 0
        return (parse_bytes(budget) or 0) + n_host

    def _load(self, request: ModelRequest, progress: Progress) -> LM:
        """Call `weft.load` with the request's and the configuration's settings. Blocks."""
        config = self.config
        options = config.engine_options if request.source in config.models else {}
        return load(
            request.source,
            engine=request.engine or config.engine,
            n_ctx=request.n_ctx or config.n_ctx,
            kv_budget=config.kv_budget if request.kv_budget is None else request.kv_budget,
            offload=config.offload if request.offload is None else request.offload,
            draft=config.draft,
            device=request.device,
            dtype=request.dtype,
            chat_template=config.chat_template if request.source in config.models[:1] else None,
            engine_options=dict(options) or None,
            progress=progress,
        )

    async def unload(self, name: str, *, force: bool = False) -> None:
        """Close a model and remove it from the registry.

        force: also while jobs use it; these fail. Raises: NotFound; Conflict while it is in use.
        """
        model = self.get(name)
        if model.n_users and not force:
            raise Conflict(
                f"model {name!r} is in use by {model.n_users} jobs",
                code="model_in_use",
                hint="cancel them, or unload it with force",
            )
        self._remove(model)
        if model.lm is not None:
            await asyncio.to_thread(model.lm.close)

    def _remove(self, model: ServedModel) -> None:
        """Remove a model from the registry."""
        if self._models.get(model.name) is model:
            del self._models[model.name]
        if self.default == model.name:
            self.default = next(iter(self._models), None)

    async def _load_and_evict(self, new: ServedModel, progress: Progress) -> LM:
        """Load a model, evict others to make room, and return its LM.

        If all fit into memory, eviction comes after the load, so that a failed load evicts nothing.

        progress: called with the progress of loading.
        Raises: RequestError if there is no room; as `weft.load`.
        """
        new.n_bytes = await asyncio.to_thread(self._weights_bytes, new.request, progress)
        n_bytes = new.n_bytes + self._budget_bytes(new.request)
        evicted = self._to_evict(new, n_bytes)
        if evicted and not self._fits_now(n_bytes):
            if not _fits_machine(evicted, n_bytes):
                raise self._no_room_error(new, n_bytes)
            await self._evict(evicted, new)
        lm = await asyncio.to_thread(self._load, new.request, progress)
        try:
            await self._evict(self._to_evict(new, n_bytes), new)
        except BaseException:
            await asyncio.to_thread(lm.close)
            raise
        return lm

    def _to_evict(self, new: ServedModel, n_bytes: int) -> list[ServedModel]:
        """Return the idle models to evict, so that one of `n_bytes` fits the configured limits.

        The least recently used models come first.
        Raises: RequestError if evicting all idle models is not enough.
        """
        loaded = [model for model in self if model.lm is not None]
        idle = sorted((m for m in loaded if m.is_evictable), key=lambda m: m.used)
        evicted: list[ServedModel] = []
        while not self._has_room(loaded, evicted, n_bytes):
            if not idle:
                raise self._no_room_error(new, n_bytes)
            evicted.append(idle.pop(0))
        return evicted

    async def _evict(self, models: list[ServedModel], new: ServedModel) -> None:
        """Unload these models, to make room for `new`."""
        lms = [model.lm for model in models if model.lm is not None]
        for model in models:
            _log.warning("evicting model %s to make room for %s", model.name, new.name)
            model.lm, model.state = None, "evicted"
        for lm in lms:
            await asyncio.to_thread(lm.close)

    def _fits_now(self, n_bytes: int) -> bool:
        """Return True if a model of `n_bytes` is known to fit into memory without evicting any.

        False if that is unknown.
        """
        loaded = [model for model in self if model.lm is not None]
        budget, left = self.config.memory_budget, bytes_left()
        if budget is not None and sum(model.n_bytes for model in loaded) + n_bytes > budget:
            return False
        return left is not None and n_bytes <= left and all(map(_is_on_cpu, loaded))

    def _has_room(
        self, loaded: list[ServedModel], evicted: list[ServedModel], n_bytes: int
    ) -> bool:
        """Return True if one more model of `n_bytes` is within the configured limits.

        loaded: the loaded models. evicted: those of them that will have been evicted.
        """
        left = [model for model in loaded if model not in evicted]
        budget = self.config.memory_budget
        is_in_budget = budget is None or sum(model.n_bytes for model in left) + n_bytes <= budget
        return is_in_budget and len(left) < self.config.model_limit

    def _no_room_error(self, new: ServedModel, n_bytes: int) -> RequestError:
        """Return the error for a model that does not fit, with the models that are in use."""
        return RequestError(
            503,
            "out_of_memory",
            f"no room for model {new.name!r} of {n_bytes >> 20} MiB, even after evicting the idle"
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
        """Check that the configuration lets a request load this path, Hub id or URL.

        Whether a file exists makes no difference, so that requests cannot probe for files.
        Raises: RequestError.
        """
        if source in self.config.models or source in (EMBEDDED, SMOLLM2):
            return
        if is_url(source):
            raise _not_allowed_error("URLs of other servers can be given only at server start")
        if is_path(source):
            if not is_below(source, self.config.model_roots):
                raise _not_allowed_error("the path is not below a folder given with --model-root")
        elif not self.config.hub:
            raise _not_allowed_error("Hub models need --allow-hub")

    async def close(self) -> None:
        """Remove all models from the registry, and close their LMs; idempotent."""
        for model in self:
            self._remove(model)
            if model.lm is not None:
                await asyncio.to_thread(model.lm.close)


def _not_allowed_error(why: str) -> RequestError:
    """Return the error for a source that requests may not load. why: the reason."""
    return RequestError(403, "model_not_allowed", f"this model may not be loaded here: {why}")


def is_path(source: str) -> bool:
    """Return True if a source is a file or folder: by its spelling, or because it exists."""
    is_path_like = source.startswith((".", "/", "~", "\\")) or "\\" in source or "\x00" in source
    parts = source.partition("@")[0].split("/")
    # A Hub id is org/name or name; a Windows drive has a colon.
    is_id = len(parts) <= 2 and all(parts) and ":" not in source and ".." not in parts
    return is_path_like or not is_id or source.lower().endswith(".gguf") or _exists(source)


def _exists(source: str) -> bool:
    """Return True if a file or folder exists; False also if that cannot be determined."""
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long for a path, for example
        return True


def is_below(path: str | os.PathLike[str], roots: tuple[Path, ...]) -> bool:
    """Return True if a path, with symlinks resolved, is in one of these folders."""
    try:
        real = Path(path).expanduser().resolve()
        return any(real.is_relative_to(root.expanduser().resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        return False


def checked_files(source: str, engine: str, device: str, progress: Progress) -> Path | None:
    """Read a model's header; return its file or folder, or None for a URL of another server.

    Args:
        source: path, Hub id or URL. A Hub model is downloaded; weights are not read.
        engine, device: as in `weft.load`.
        progress: called with the progress of a download.

    Raises: as `weft.load`, for a model that is missing, broken or not for the engine.
    """
    if is_url(source):
        return None
    check_engine_fits(engine, source)
    if is_gguf(source):
        file = gguf_file(source)
        read_gguf(file)
        gguf_engine(source, engine, device)
        return file
    check = partial(check_model_supported, source, engine)
    folder = resolve(source, suits=check, progress=progress)
    check(folder)
    return folder


def _fits_machine(evicted: list[ServedModel], n_bytes: int) -> bool:
    """Return False if a model is known not to fit into memory even after evicting these models.

    n_bytes: size of the new model. True if that is unknown, as with models on a GPU.
    """
    left = bytes_left()
    if left is None or not all(map(_is_on_cpu, evicted)):
        return True
    return n_bytes <= left + sum(model.n_bytes for model in evicted)


def _is_on_cpu(model: ServedModel) -> bool:
    """Return True if a loaded model uses host memory."""
    return model.lm is not None and model.lm.info.device == "cpu"


def weights_bytes(path: Path) -> int:
    """Return the bytes of a model's file, or of all weight files in its folder."""
    files = [path] if path.is_file() else path.rglob("*")
    kinds = (".safetensors", ".gguf", ".bin", ".npz")
    return sum(file.stat().st_size for file in files if file.suffix in kinds)


def kv_bytes(lm: LM) -> int:
    """Return the bytes that an LM's KV may take on device and host; 0 if that is unbounded."""
    slots = (lm.tree.budget.capacity or 0) + lm.tree.host.capacity
    return slots * lm.info.kv_bytes_per_token


def _warn_of_budget(name: str, lm: LM) -> None:
    """Log a warning if the KV budget is smaller than the context.

    Paths that exceed the budget will be rejected. name: of the model.
    """
    slots = lm.tree.budget.capacity
    if slots is not None and slots < lm.n_ctx:
        n_bytes = lm.n_ctx * lm.info.kv_bytes_per_token
        _log.warning(
            "model %s: the KV budget holds %d tokens, but the context has %d; longer paths are"
            " rejected. Set --kv-budget %dKiB or more, or --n-ctx %d",
            name, slots, lm.n_ctx, -(-n_bytes // 1024), slots,
        )  # fmt: skip


def _as_weft_error(error: Exception) -> WeftError:
    """Return a WeftError unchanged; wrap any other error of a load in one."""
    if isinstance(error, WeftError):
        return error
    wrapped = WeftError(f"the model could not be loaded: {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped
