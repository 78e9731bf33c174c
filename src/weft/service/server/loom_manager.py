"""The looms of a server: those that are open in this process, and the library that has them all."""

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
from ..store.facts import LoomRow
from ..store.kept import KeptLoom
from ..store.library import Library
from .models import ModelRegistry, ServedModel
from .open_loom import FRESH_S, OpenLoom
from .ticker import Ticker

_log = logging.getLogger(__name__)
LEASE_S = 5.0  # before another server takes over a loom whose server is not heard of
IDLE_S = 300.0  # before a loom that nobody uses is closed
MAX_OPEN = 256
_WATCH_S = 1.0  # between two looks at what other processes wrote, while somebody listens


class LoomManager:
    """All looms: those that are open here, and the library that has them all."""

    def __init__(self, library: Library, models: ModelRegistry, ticker: Ticker) -> None:
        self.library = library
        self.models = models
        self.ticker = ticker
        self._live: dict[str, OpenLoom] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._rows: dict[str, tuple[float, LoomRow]] = {}
        self._watcher: asyncio.Task[None] | None = None

    @property
    def n_open(self) -> int:
        """How many are open."""
        return len(self._live)

    async def row(self, given: str) -> LoomRow:
        """Return what a list says of a loom, by its name or id, or said a moment ago.

        Raises: NotFound.
        """
        at, known = self._rows.get(given, (0.0, None))
        if known is not None and time.monotonic() - at < FRESH_S:
            return known
        return await self._read_row(given)

    async def row_now(self, given: str) -> LoomRow:
        """As `row`, with all that was written here: for who is told of more than its name."""
        row = await self.row(given)
        live = self._live.get(row.id)
        if live is None or row.rev >= live.kept.rev:
            return row
        return await self._read_row(given)

    async def _read_row(self, given: str) -> LoomRow:
        try:
            row = await asyncio.to_thread(self.library.row, given)
        except ConfigError as error:
            hint = "GET /api/v1/looms lists them all"
            raise NotFound(str(error), what="loom", hint=hint) from error
        except StoreError as error:
            gone = await asyncio.to_thread(self.library.removed)
            if not any(given in (each.id, each.name) for each in gone):
                raise
            again = "POST /api/v1/looms/restore brings back what was removed last"
            raise _no_loom(given, again) from error
        if len(self._rows) >= MAX_OPEN:
            self._rows.clear()
        self._rows[given] = time.monotonic(), row
        return row

    def forget_rows(self) -> None:
        """Looms were renamed, removed or brought back: what is known of their names is old."""
        self._rows.clear()

    @asynccontextmanager
    async def open_locked(
        self, given: str, *, model: str | None = None, grows: bool = False
    ) -> AsyncIterator[OpenLoom]:
        """Open a loom where it is not, take in what others wrote, and hold its lock.

        grows: its model must be there. model: another one than its own that grows it.
        Raises: NotFound; ModelMismatch; Refused while its model is being loaded.
        """
        row = await self.row(given)
        live = await self._opened(row, model, grows)
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

    async def _opened(self, row: LoomRow, model: str | None, grows: bool) -> OpenLoom:
        opening = self._opening.setdefault(row.id, asyncio.Lock())
        async with opening:
            live = self._live.get(row.id)
            lm = await self._lm_for(row, model, needed=grows)
            if live is not None and not live.is_stale and not _needs_other(live, lm, grows):
                return live
            if live is not None and live.growing and not live.is_stale:
                raise Conflict(
                    f"the loom {row.name} is being grown by another model",
                    rev=live.kept.rev,
                    code="loom_in_use",
                )
            try:
                kept = await asyncio.to_thread(self.library.open, row.id, lm)
            except ModelMismatch:
                if grows:
                    raise
                kept, lm = await asyncio.to_thread(self.library.open, row.id), None
            before, self._live[row.id] = live, OpenLoom(kept, lm, self.ticker)
            if before is not None:
                if before.lm is lm and before.pins:
                    pins = self._live[row.id].pins
                    await asyncio.to_thread(pins.inherit, before.pins, kept)
                before.release()
            return self._live[row.id]

    async def _lm_for(self, row: LoomRow, model: str | None, *, needed: bool) -> LM | None:
        found = self.models.get(model) if model is not None else self.model_of(row)
        if found is not None and needed:
            found = await self.models.available(found.name)
        if found is not None and (needed or found.lm is not None):
            return found.ready()
        if needed:
            raise NotFound(
                f"the model {row.model!r} of this loom is not loaded here",
                what="model",
                hint="load it: POST /api/v1/models, or name another one of the same weights",
            )
        return None

    def model_of(self, row: LoomRow) -> ServedModel | None:
        """Return the model on the shelf that a loom was made with; None where it is not there."""
        for model in self.models:
            if row.model in (model.source, model.name):
                return model
        return None

    def put(self, kept: KeptLoom, lm: LM | None) -> OpenLoom:
        """Note a loom that was just made."""
        live = self._live[kept.id] = OpenLoom(kept, lm, self.ticker)
        return live

    def open_ones(self) -> list[OpenLoom]:
        """Return the looms that are open here."""
        return list(self._live.values())

    def open_one(self, loom_id: str) -> OpenLoom | None:
        """Return a loom that is open here; None for another."""
        return self._live.get(loom_id)

    def removed(self, loom_id: str) -> None:
        """A loom was removed: end what grows in it, and let go of it."""
        self.forget_rows()
        live = self._live.pop(loom_id, None)
        if live is None:
            return
        for branches in list(live.growing):
            branches.cancel()
        live.pins.clear()
        live.events.put("removed", {"loom": loom_id})
        live.events.end()
        live.feed.end()

    def start(self) -> None:
        """Begin to close idle looms, and to look for others' changes where somebody listens."""
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            now = time.monotonic()
            by_use = sorted(self._live.items(), key=lambda each: each[1].used)
            for loom_id, live in by_use:
                if live.n_readers and not live.lock.locked():
                    await self._look_at(live)
                is_old = now - live.used > IDLE_S or len(self._live) > MAX_OPEN
                if is_old and live.is_idle and self._live.get(loom_id) is live:
                    del self._live[loom_id]
                    self._opening.pop(loom_id, None)
                    live.kept.loom.close()

    async def _look_at(self, live: OpenLoom) -> None:
        """Tell its readers what others did: commands, other servers."""
        try:
            async with live.lock:
                await live.sync(now=True)
            is_gone = live.kept.is_removed
        except StoreUnavailable as error:
            _log.warning("loom %s: %s", live.kept.name, error)
            return
        except StoreError as error:  # it was removed for good
            _log.warning("loom %s: %s", live.kept.name, error)
            is_gone = True
        if is_gone and self._live.get(live.kept.id) is live:
            self.removed(live.kept.id)

    def end_feeds(self) -> None:
        """End what readers of all looms listen to."""
        for live in self._live.values():
            live.events.end()
            live.feed.end()

    async def close(self) -> None:
        """Let go of all looms, and of the library."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for live in self._live.values():
            await live.close()
        self._live.clear()
        await asyncio.to_thread(self.library.close)


def _needs_other(live: OpenLoom, lm: LM | None, grows: bool) -> bool:
    """Whether a loom must be opened anew: its model came, went, or is another one."""
    if live.lm is lm or (lm is None and not grows):
        return live.lm is not None and live.lm.closed and lm is not None
    return True


def _no_loom(given: str, hint: str = "") -> NotFound:
    return NotFound(f"there is no loom {given!r:.120}", what="loom", hint=hint)
