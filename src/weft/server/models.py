"""The shelf of models: one LM, and so one scheduler, for each; loaded and unloaded on the run."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..engines import engine_names
from ..engines.source import EMBEDDED, SMOLLM2
from ..errors import ConfigError, Conflict, NotFound, WeftError
from ..lm import LM
from ..loading import display_name, is_url, load
from .config import ServerConfig
from .errors import Refused

_log = logging.getLogger(__name__)
State = Literal["loading", "ready", "failed"]
# Called with what `weft.load` reports: phase, done, total, note. From any thread.
Progress = Callable[[str, int, int, str], None]


@dataclass(eq=False)
class ServedModel:
    """A model on the shelf. lm: None while it loads, and where that failed; `error` says why."""

    name: str
    source: str
    state: State = "loading"
    lm: LM | None = None
    error: WeftError | None = None
    progress: tuple[str, int, int] = ("load", 0, 1)
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    n_users: int = 0
    n_bytes: int = 0  # of weights and KV budget

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
        """Return the LM. Raises: Refused while it loads, and why it could not be loaded."""
        if self.lm is not None:
            return self.lm
        if self.error is not None:
            raise self.error
        phase, done, total = self.progress
        raise Refused(
            503,
            "model_loading",
            f"model {self.name!r} is being loaded: {phase} {100 * done // max(total, 1)} %",
            details={"phase": phase, "done": done, "total": total},
        )


@dataclass(frozen=True, slots=True)
class ModelWish:
    """What `load` is asked for; None and "auto" as the server was started."""

    source: str
    name: str | None = None
    engine: str | None = None
    n_ctx: int | None = None
    kv_budget: str | int | None = None
    offload: str | int | None = None
    device: str = "auto"
    dtype: str = "auto"


class ModelShelf:
    """The models by their names; used from the event loop only.

    What somebody asks for by request is loaded only if the configuration allows its source. Where
    all together would take more than the memory budget, those are unloaded that have not been used
    for the longest time; none that is in use.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.default: str | None = None
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
        model = self.get(name)
        model.used = time.monotonic()
        return model.ready()

    def name_of(self, lm: LM) -> str:
        """Return the name of the model whose LM this is. Raises: NotFound for one that is gone."""
        for model in self:
            if model.lm is lm:
                return model.name
        raise NotFound("the model was unloaded meanwhile", what="model")

    def begin(self, wish: ModelWish, *, by_request: bool = True) -> ServedModel:
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
        if there is not None and there.state != "failed":
            raise Conflict(
                f"there is a model {name!r} already, of {display_name(there.source)}",
                hint="unload it first, or load this one under another name",
            )
        model = self._models[name] = ServedModel(name, wish.source)
        self.default = self.default or name
        return model

    async def finish(
        self, model: ServedModel, wish: ModelWish, progress: Progress | None = None
    ) -> None:
        """Load a model that `begin` put here; it can be used afterwards. Raises: as `weft.load`."""

        def tell(phase: str, done: int, total: int, note: str) -> None:
            model.progress = (phase, done, total)
            if progress is not None:
                progress(phase, done, total, note)

        async with self._loading:
            try:
                model.n_bytes = weights_bytes(wish.source)
                await self._make_room(model)
                lm = await asyncio.to_thread(self._load, wish, tell)
            except Exception as error:
                model.state, model.error = "failed", _as_ours(error)
                raise model.error from model.error.__cause__
            except BaseException:
                self._forget(model)
                raise
            if self._models.get(model.name) is not model:  # it was unloaded meanwhile
                await asyncio.to_thread(lm.close)
                raise Conflict(f"model {model.name!r} was unloaded while it was being loaded")
            model.n_bytes += kv_bytes(lm)
            model.lm, model.state = lm, "ready"
        _log.info("model %s is loaded, on the %s engine", model.name, lm.info.name)
        _warn_of_budget(model.name, lm)

    def _load(self, wish: ModelWish, tell: Progress) -> LM:
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
            engine_options=dict(options) or None,
            progress=tell,
        )

    async def unload(self, name: str, *, force: bool = False) -> None:
        """Close a model and forget it. Raises: NotFound; Conflict while somebody uses it."""
        model = self.get(name)
        if model.n_users and not force:
            raise Conflict(
                f"model {name!r} is in use by {model.n_users} jobs",
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

    async def _make_room(self, new: ServedModel) -> None:
        """Unload what has been idle the longest. Raises: Refused where that is not enough."""
        budget, most = self.config.memory_budget, self.config.max_models
        while True:
            others = [each for each in self if each is not new and each.lm is not None]
            taken = sum(each.n_bytes for each in others) + new.n_bytes
            if len(others) < most and (budget is None or taken <= budget):
                return
            idle = [each for each in others if not each.n_users]
            if not idle:
                raise Refused(
                    503,
                    "out_of_memory",
                    f"{len(others)} models are in use and there is no room for another",
                    hint="unload one, or start the server with a larger --memory-budget",
                    details={"taken_bytes": taken, "budget_bytes": budget, "max_models": most},
                )
            oldest = min(idle, key=lambda each: each.used)
            _log.info("model %s is unloaded to make room for %s", oldest.name, new.name)
            await self.unload(oldest.name)

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


def _not_allowed(why: str) -> Refused:
    return Refused(403, "model_not_allowed", f"this model may not be loaded here: {why}")


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


def weights_bytes(source: str) -> int:
    """Return the size of a source's files; 0 where they are not here."""
    try:
        if is_url(source) or not Path(source).exists():
            return 0
        path = Path(source).expanduser()
        files = [path] if path.is_file() else path.rglob("*")
        kinds = (".safetensors", ".gguf", ".bin", ".npz")
        return sum(each.stat().st_size for each in files if each.suffix in kinds)
    except (OSError, ValueError):
        return 0


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
