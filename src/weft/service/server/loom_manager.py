"""Opens looms of the library on request, and closes idle ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...errors import (
    ConfigError,
    Conflict,
    ModelMismatch,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from ...lm.lm import LM
from ..store.library import Library
from ..store.stored_loom import StoredLoom
from ..store.summary import LoomSummary
from .models import ModelRegistry, ServedModel
from .open_loom import FRESH_S, OpenLoom
from .ticker import Ticker

_log = logging.getLogger(__name__)
LEASE_S = 5.0  # seconds without a heartbeat before another server may take over a loom
IDLE_S = 300.0  # seconds before an idle loom is closed
MAX_OPEN = 256
_WATCH_S = 1.0  # seconds between two checks for changes by other processes


class LoomManager:
    """Opens stored looms, and closes idle ones; also syncs them with other processes.

    Callers create looms in `library` and register them with `put`.
    """

    def __init__(self, library: Library, models: ModelRegistry, ticker: Ticker) -> None:
        self.library = library
        self.models = models
        self.ticker = ticker
        self._live: dict[str, OpenLoom] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._rows: dict[str, tuple[float, LoomSummary]] = {}
        self._watcher: asyncio.Task[None] | None = None

    @property
    def n_open(self) -> int:
        """Number of open looms."""
        return len(self._live)

    async def row(self, given: str) -> LoomSummary:
        """Return the summary of a loom, by name or id, from a cache.

        It is at most `FRESH_S` seconds old. Raises: NotFound.
        """
        at, cached = self._rows.get(given, (0.0, None))
        if cached is not None and time.monotonic() - at < FRESH_S:
            return cached
        return await self._read_row(given)

    async def row_now(self, given: str) -> LoomSummary:
        """Return the summary of a loom, including every write of this process. Raises: NotFound."""
        row = await self.row(given)
        live = self._live.get(row.id)
        if live is None or row.rev >= live.stored.rev:
            return row
        return await self._read_row(given)

    async def _read_row(self, given: str) -> LoomSummary:
        """Read a loom's summary from the database. Raises: NotFound."""
        try:
            row = await asyncio.to_thread(self.library.row, given)
        except ConfigError as error:
            hint = "GET /api/v1/looms lists them all"
            raise NotFound(str(error), what="loom", hint=hint) from error
        except StoreError as error:
            removed = await asyncio.to_thread(self.library.removed)
            if not any(given in (each.id, each.name) for each in removed):
                raise
            hint = "POST /api/v1/looms/restore restores the looms removed last"
            raise _no_loom_error(given, hint) from error
        if len(self._rows) >= MAX_OPEN:
            self._rows.clear()
        self._rows[given] = time.monotonic(), row
        return row

    def forget_rows(self) -> None:
        """Clear the row cache after looms were renamed, removed or restored."""
        self._rows.clear()

    @asynccontextmanager
    async def open_locked(
        self, given: str, *, model: str | None = None, grows: bool = False
    ) -> AsyncIterator[OpenLoom]:
        """Open a loom, merge changes of other processes, and hold its lock during the block.

        Args:
            given: its name or id.
            model: name of the model to use; None means the loom's own.
            grows: nodes will be generated, so the loom's model must be loaded.

        Raises: NotFound; ModelMismatch; RequestError while its model is loading.
        """
        row = await self.row(given)
        live = await self._open(row, model, grows)
        live.n_users += 1
        try:
            async with live.lock:
                live.used = time.monotonic()
                await live.sync()
                yield live
        finally:
            live.n_users -= 1
            if live.is_stale and not live.growing and self._live.get(row.id) is live:
                del self._live[row.id]
                live.release()

    async def _open(self, row: LoomSummary, model: str | None, grows: bool) -> OpenLoom:
        """Return the open loom; open or reopen it if needed. Arguments as for `open_locked`."""
        opening = self._opening.setdefault(row.id, asyncio.Lock())
        async with opening:
            live = self._live.get(row.id)
            lm = await self._lm_for(row, model, needed=grows)
            if live is not None and not live.is_stale and not _needs_other(live, lm, grows):
                return live
            if live is not None and live.growing and not live.is_stale:
                raise Conflict(
                    f"another model is growing the loom {row.name}",
                    rev=live.stored.rev,
                    code="loom_in_use",
                )
            try:
                stored = await asyncio.to_thread(self.library.open, row.id, lm)
            except ModelMismatch:
                if grows:
                    raise
                stored, lm = await asyncio.to_thread(self.library.open, row.id), None
            previous, self._live[row.id] = live, OpenLoom(stored, lm, self.ticker)
            if previous is not None:
                if previous.lm is lm and previous.pins:
                    pins = self._live[row.id].pins
                    await asyncio.to_thread(pins.inherit, previous.pins, stored)
                previous.release()
            return self._live[row.id]

    async def _lm_for(self, row: LoomSummary, model: str | None, *, needed: bool) -> LM | None:
        """Return the LM of a model to open a loom with; None to open it for reading only.

        needed: raise an error instead of returning None.
        """
        model_entry = self.models.get(model) if model is not None else self.model_of(row)
        if model_entry is not None and needed:
            model_entry = await self.models.available(model_entry.name)
        if model_entry is not None and (needed or model_entry.lm is not None):
            return model_entry.ready()
        if needed:
            raise NotFound(
                f"the model {row.model!r} of this loom is not loaded here",
                what="model",
                hint="load it with POST /api/v1/models, or name a model with the same weights",
            )
        return None

    def model_of(self, row: LoomSummary) -> ServedModel | None:
        """Return the registered model that created a loom, or None."""
        for model in self.models:
            if row.model in (model.source, model.name):
                return model
        return None

    def put(self, stored: StoredLoom, lm: LM | None) -> OpenLoom:
        """Register a loom that was just created as open.

        stored: the stored loom. lm: its model; None opens it for reading only.
        """
        live = self._live[stored.id] = OpenLoom(stored, lm, self.ticker)
        return live

    def open_looms(self) -> list[OpenLoom]:
        """Return all open looms."""
        return list(self._live.values())

    def get_open(self, loom_id: str) -> OpenLoom | None:
        """Return the open loom with this id; None if it is not open in this process."""
        return self._live.get(loom_id)

    def removed(self, loom_id: str) -> None:
        """Close a loom that was removed: cancel its growth and end its event streams."""
        self.forget_rows()
        live = self._live.pop(loom_id, None)
        if live is None:
            return
        for task in list(live.growing):
            task.cancel()
        live.pins.clear()
        live.events.put("removed", {"loom": loom_id})
        live.events.end()
        live.feed.end()

    def start(self) -> None:
        """Start the task that closes idle looms and syncs looms with readers."""
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Close idle looms and sync looms with readers, from time to time; body of the task."""
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            by_use = sorted(self._live.items(), key=lambda each: each[1].used)
            for loom_id, live in by_use:
                if live.n_readers and not live.lock.locked():
                    await self._sync_for_readers(live)
                is_old = now - live.used > IDLE_S or len(self._live) > MAX_OPEN
                if is_old and live.is_idle and self._live.get(loom_id) is live:
                    del self._live[loom_id]
                    self._opening.pop(loom_id, None)
                    live.stored.loom.close()

    async def _sync_for_readers(self, live: OpenLoom) -> None:
        """Merge changes of other processes into a loom, and publish them to its event streams."""
        try:
            async with live.lock:
                await live.sync(now=True)
            is_removed = live.stored.is_removed
        except StoreUnavailable as error:
            _log.warning("loom %s: %s", live.stored.name, error)
            return
        except StoreError as error:  # it was deleted
            _log.warning("loom %s: %s", live.stored.name, error)
            is_removed = True
        if is_removed and self._live.get(live.stored.id) is live:
            self.removed(live.stored.id)

    def end_feeds(self) -> None:
        """End the event streams of all looms."""
        for live in self._live.values():
            live.events.end()
            live.feed.end()

    async def close(self) -> None:
        """Close all looms and the library."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for live in self._live.values():
            await live.close()
        self._live.clear()
        await asyncio.to_thread(self.library.close)


def _needs_other(live: OpenLoom, lm: LM | None, grows: bool) -> bool:
    """Return True if a loom must be reopened, because its model was loaded, unloaded or replaced.

    lm: the model that the caller needs; None without one. grows: nodes will be generated.
    """
    if live.lm is lm or (lm is None and not grows):
        return live.lm is not None and live.lm.closed and lm is not None
    return True


def _no_loom_error(given: str, hint: str = "") -> NotFound:
    """Return the error for a loom that does not exist."""
    return NotFound(f"there is no loom {given!r:.120}", what="loom", hint=hint)
