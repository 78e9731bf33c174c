"""A loom that is open in this process: one live tree, for all requests and jobs.

Whoever touches a tree holds its lock. What blocks (the database, a long walk) runs in a thread
meanwhile; what a job adds to a tree is added in the event loop, between two such.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...errors import (
    ConfigError,
    Conflict,
    LeaseLost,
    NotFound,
    QueueFull,
    StaleHandle,
    StoreError,
    StoreUnavailable,
    TreeError,
)
from ...lm.lm import LM
from ...loom import Heddle
from ...loom.node import is_below
from ..store.change import Change
from ..store.kept import KeptLoom
from .coalesce import Coalescer
from .events import EventLog
from .growth import Attribution
from .pins import NodePins
from .serializers import serialize_nodes
from .ticker import Ticker

if TYPE_CHECKING:
    from .growth import GrowthTask
    from .jobs import ServerJob

_log = logging.getLogger(__name__)
Value = TypeVar("Value")
FRESH_S = 0.05  # for so long what was read of the database is taken as it was
_FLUSH_S = 0.5  # between two times that the tokens of growing nodes are made durable
_TOLD = 200  # nodes of a change that are told whole
_KEPT_LATER = (
    "let the server run, and see to its database: what has grown is kept by itself as soon as that"
    " can be, and need not be grown again; an edit is to be done again"
)
_IN_PLACE = ("edit", "grow")  # what these change stays where it is


class ExpectedRevision(NamedTuple):
    """A node as the author of a change saw it: at which revision; None where nobody says."""

    node: Heddle
    rev: int | None


class OpenLoom:
    """An open loom. `lock` is held by whoever touches its tree.

    growing: what grows in it now; jobs: whose it is. events: its changes, and where to read on;
    feed: these and what its jobs tell, each with its `job`. pins: the nodes whose KV is pinned.
    """

    def __init__(self, kept: KeptLoom, lm: LM | None, ticker: Ticker) -> None:
        self.kept = kept
        self.lm = lm
        self.ticker = ticker
        self.lock = asyncio.Lock()
        begin = int(1000 * time.time())  # no log has had so many events: those before had less
        self.events = EventLog(self._snapshot, most=1024, also=self.tell, begin=begin)
        self.feed = EventLog(self._whole, begin=begin)
        self.jobs: list[ServerJob] = []
        self.growing: list[GrowthTask] = []
        self.pins = NodePins()
        self.used = time.monotonic()
        self.n_users = 0
        self.first_rev = kept.rev
        self.is_stale = False  # what is in it was not kept: it is to be opened anew
        self._numbering = Coalescer(self.lock, self._number)
        self._lasting = Coalescer(self.lock, self._make_all_durable)
        self._keeping = Coalescer(self.lock, self._commit_growth)
        self._synced = 0.0
        self._name = kept.name  # as it was told; what is written takes in a new one, too
        self._marks: dict[str, int] = {}  # the revision that changed a node last, by id
        self._kin: dict[str, int] = {}  # and the one that changed its children
        self._gone: dict[int, int] = {}  # number to revision of what was removed, and is out still
        self._flusher: asyncio.Task[None] | None = None
        # Whose is to be kept still.
        self._unkept: Attribution | None = None

    def _snapshot(self) -> dict[str, Any]:
        return {"loom": self.kept.id, "rev": self.kept.rev}

    def _whole(self) -> dict[str, Any]:
        return {**self._snapshot(), "jobs": [job.snapshot() for job in self.jobs]}

    def tell(self, name: str, data: dict[str, Any], job: str | None = None) -> None:
        """Tell who listens to everything at once; `job` is whose event it is."""
        if self.feed.n_readers:
            self.feed.put(name, data if job is None else {"job": job, **data})
        else:
            self.feed.skip()

    # Reading and changing

    async def call(self, work: Callable[[], Value]) -> Value:
        """Run something that blocks in a thread, with the lock held by the caller, to its end."""
        future = asyncio.get_running_loop().run_in_executor(None, work)
        while True:
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                # The thread goes on: the lock must not be let go of before it is done.
                if future.done():
                    raise
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
                if future.done():
                    raise

    async def told(self, work: Callable[[], Change]) -> Change:
        """As `call`, and tell what was changed; also where the caller is cancelled meanwhile."""
        done: list[Change] = []

        def noted() -> Change:
            done.append(change := work())
            self.pins.follow(self.kept, change)
            return change

        try:
            return await self.call(noted)
        finally:
            for change in done:
                self.publish(change)

    @asynccontextmanager
    async def released_lock(self) -> AsyncIterator[None]:
        """Let others have the tree, while the model works for who holds the lock."""
        self.lock.release()
        try:
            yield
        finally:
            cancelled: asyncio.CancelledError | None = None
            while True:
                try:
                    await self.lock.acquire()
                    break
                except asyncio.CancelledError as error:  # who let go of it has it again, always
                    cancelled = error
            if cancelled is not None:
                raise cancelled

    async def sync(self, *, now: bool = False) -> None:
        """Take in what other processes wrote. The caller holds the lock.

        now: even if that was done a moment ago.
        """
        if now or time.monotonic() - self._synced > FRESH_S:
            await self.told(self.kept.sync)
            if self.kept.name != self._name:
                self._name = self.kept.name
                self.events.put("renamed", {"loom": self.kept.id, "name": self._name})
            self._synced = time.monotonic()

    async def change(
        self, kind: str, edit: Callable[[], Any], actor: str, seen: ExpectedRevision | None = None
    ) -> Change:
        """Edit the tree and keep it, as one operation. The caller holds the lock.

        Raises: what `edit` does, and nothing has changed; StoreError where it was not kept;
        Conflict where another server has changed what was `seen`, until it was kept.
        """
        await self.commit_finished()
        unchanged = self.unchanged(seen)

        def work() -> Change:
            edit()
            return self.kept.commit(kind, actor=actor, leave=self.ended(), unchanged=unchanged)

        try:
            return await self.told(work)
        except Exception as error:
            await self._take_back(error)
            raise

    async def _take_back(self, error: Exception) -> None:
        """Let an edit that failed leave nothing: the next commit, whosever it is, would keep it."""
        if isinstance(error, LeaseLost):
            self.is_stale = True
        elif await self.call(self.kept.is_changed):
            if self.lm is None:
                self.is_stale = True
            else:  # what has grown here, and could not be kept either, is in no other place
                await self.call(self.kept.put_back)

    def ended(self, but: Sequence[GrowthTask] = ()) -> list[Heddle]:
        """Return what has ended, and is for its own job to keep. but: not of these."""
        return [node for each in self.growing if each not in but for node in each.ended]

    async def keep(self, author: Attribution, of: Sequence[GrowthTask] = ()) -> None:
        """Keep what has grown, as one operation. The caller holds the lock. Raises: StoreError.

        of: whose it is; what has ended of others waits for theirs.
        """
        leave, (kind, actor, act, model) = self.ended(of), author

        def commit() -> Change:
            return self.kept.commit(kind, actor=actor, act=act, model=model, leave=leave)

        try:
            await self.told(commit)
        except LeaseLost:
            self._lose()
            raise
        except StoreUnavailable as error:
            self._unkept = author
            self._begin_flushing()
            # NOTE: of an edit nothing is kept, as the database says; what has grown stays here.
            why = f"what has grown is in the server's memory, and not kept yet: {error}"
            raise StoreUnavailable(why, hint=_KEPT_LATER) from error
        except StoreError:  # it was removed for good, or is broken: trying again is of no use
            self.is_stale = True
            raise
        self._unkept = None

    async def commit_growth(self, branches: GrowthTask) -> None:
        """Keep what has grown, with that of an actor's other calls in one operation.

        The caller does not hold the lock. Raises: StoreError.
        """
        await self._keeping.do(branches)

    async def _commit_growth(self, those: list[GrowthTask]) -> None:
        for author in dict.fromkeys(each.author.alone for each in those):
            # Those that are over by now come along, and find nothing to do.
            over = [each for each in self.growing if each in those or not each.nodes]
            own = [each for each in over if each.author.alone == author]
            pending = [branch for each in own for branch in each.growth.branches]
            if not all(self.kept.has(branch.child) for branch in pending):
                await self.keep(own[0].author if len(own) == 1 else author, own)

    async def commit_finished(self) -> None:
        """Keep what has ended, each job's as its own: an edit is no more than that.

        The caller holds the lock. Raises: StoreError.
        """
        if self._unkept is not None:
            await self.keep(self._unkept)
        for each in list(self.growing):
            if not all(map(self.kept.has, each.ended)):
                await self.keep(each.author, [each])

    def _lose(self) -> None:
        """Another server has the loom now: what grows here is of no use."""
        self.is_stale = True
        for branches in list(self.growing):
            branches.cancel(reason="interrupted")

    def publish(self, change: Change) -> None:
        """Note what has changed, and tell who listens."""
        others = change.others
        if others is not None:
            self._note(change.rev, "sync", *others)
        self._note(change.rev, change.kind, change.added, change.changed, change.removed)

    def _note(
        self,
        rev: int,
        kind: str,
        added: Iterable[Heddle],
        changed: Iterable[Heddle],
        removed: Iterable[str],
    ) -> None:
        added, changed, removed = list(added), list(changed), list(removed)
        if not (added or changed or removed):
            return
        numbers = self.kept.numbers()
        for node in (*added, *changed):
            self._marks[node.id] = rev
            self._gone.pop(numbers.get(node.id, -1), None)
        for node_id in removed:
            self._marks[node_id] = rev
            self._gone[numbers.get(node_id, -1)] = rev
        parents = (node.parent for node in (*added, *(() if kind in _IN_PLACE else changed)))
        kin = {parent.id: parent for parent in parents if parent is not None}
        self._kin.update(dict.fromkeys(kin, rev))
        told = len(added) + len(changed) <= _TOLD and self.n_readers
        self.events.put(
            "change",
            {
                "rev": rev,
                "kind": kind,
                "added": serialize_nodes(self, added) if told else [],
                "changed": serialize_nodes(self, changed) if told else [],
                "removed": [numbers.get(node_id, -1) for node_id in removed],
                "children": {
                    str(self.number(parent)): list(map(self.number, self.children_of(parent)))
                    for parent in (kin.values() if told else ())
                },
                "whole": bool(told),
            },
        )

    def since(self, rev: int) -> tuple[set[str], list[int]] | None:
        """Return the ids of what changed after a revision, and the numbers that went.

        None where nobody knows any more.
        """
        if not self.first_rev <= rev <= self.kept.rev:
            return None
        marks = (self._marks, self._kin)
        came = {node_id for each in marks for node_id, at in each.items() if at > rev}
        return came, [number for number, at in self._gone.items() if at > rev]

    def check_rev(self, node: Heddle, rev: int | None) -> None:
        """Refuse a change to a node that was changed after the revision its author saw."""
        if rev is not None and (now := self._marks.get(node.id, self.first_rev)) > rev:
            raise Conflict(
                f"node {self.kept.number(node)} was changed in revision {now}, after the one that"
                f" you saw ({rev})",
                rev=self.kept.rev,
                hint="read it anew, and change that",
            )

    def unchanged(self, seen: ExpectedRevision | None) -> list[Heddle]:
        """Return what must not be changed by others until it is kept. Raises: Conflict."""
        if seen is None or seen.rev is None:
            return []
        self.check_rev(*seen)
        return [seen.node]

    # Nodes

    def node(self, given: str | int) -> Heddle:
        """Return a node by its number or id, one that grows, too. Raises: NotFound."""
        name, numbers = str(given), self.kept.numbers()
        for branches in self.growing:
            for child in branches.uncommitted:
                is_it = child.id == name or str(numbers.get(child.id)) == name
                if is_it and is_below(child, self.kept.loom):
                    return child
        try:
            return self.kept.node(given)
        except ConfigError as error:
            message = f"there is no node {str(given)!r:.80} in the loom {self.kept.name}"
            hint = f"GET /api/v1/looms/{self.kept.id}/nodes lists them"
            raise NotFound(message, what="node", hint=hint) from error

    def number(self, node: Heddle) -> int:
        """Return a node's number; -1 for one that is not kept yet."""
        try:
            return self.kept.number(node)
        except TreeError:
            return -1

    def is_growing(self, node: Heddle) -> bool:
        """Whether tokens are being added to this very node."""
        return any(node in branches.nodes for branches in self.growing)

    def check_not_growing(self, node: Heddle) -> None:
        """Raise Conflict for a node that grows itself: its end is not there yet."""
        if self.is_growing(node):
            self.check_nothing_grows(node)

    def check_nothing_grows(self, node: Heddle) -> None:
        """Raise Conflict for a node that grows, or below which something grows from it."""
        for branches in self.growing:
            if node in branches.nodes or any(node is each for each in branches.parents):
                raise Conflict(
                    f"node {self.number(node)} is being grown",
                    rev=self.kept.rev,
                    hint="wait until its job has ended, or cancel that",
                )

    def drop_growing(self, top: Heddle) -> None:
        """End what grows below a node that is about to go; nothing of it is kept."""
        for branches in self.growing:
            branches.drop_below(top)

    def cancel_node(self, node: Heddle) -> None:
        """End one node that grows; nothing of it is kept."""
        for branches in self.growing:
            branches.drop([node])

    def children_of(self, node: Heddle) -> list[Heddle]:
        """Return a node's children, those that grow among them."""
        children = list(node.children)
        for branches in self.growing:
            branches.insert_growing(node, children)
        return children

    # Growing

    def begin(self, branches: GrowthTask) -> None:
        """Note branches that begin to grow, and make their tokens durable as they come."""
        self.growing.append(branches)
        self._begin_flushing()

    def _begin_flushing(self) -> None:
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())

    async def number_new(self, branches: GrowthTask) -> None:
        """Give the nodes of branches their numbers; those of many calls in one write.

        The caller does not hold the lock. Raises: StoreError; Conflict where what they were to grow
        from was removed since they were planned; they do not grow then.
        """
        try:
            await self._numbering.do(branches)
            if branches.is_gone:
                raise Conflict(
                    "what was to be grown was removed meanwhile",
                    rev=self.kept.rev,
                    code="node_removed",
                    hint="undo, or redo, brings it back",
                )
        except BaseException:
            branches.growth.abandon("cancelled")
            raise

    async def _number(self, those: list[GrowthTask]) -> None:
        for each in those:
            each.is_gone = not all(is_below(node, self.kept.loom) for node in each.nodes)
        nodes = [node for each in those if not each.is_gone for node in each.nodes]
        await self.call(partial(self.kept.append, nodes))

    def end(self, branches: GrowthTask) -> None:
        """Branches have ended, and are kept."""
        self.growing.remove(branches)
        branches.is_over = True
        self.used = time.monotonic()

    async def _flush(self) -> None:
        try:
            while self.growing or self._unkept is not None:
                await asyncio.sleep(_FLUSH_S)
                async with self.lock:
                    await self._retry_commit()
                    nodes = [node for each in self.growing for node in each.uncommitted]
                    await self.append_tokens(nodes)
        finally:
            self._flusher = None

    async def _retry_commit(self) -> None:
        """Keep what could not be kept when it had ended, if that goes by now."""
        if self._unkept is not None:
            try:
                await self.keep(self._unkept)
            except StoreUnavailable as error:
                _log.warning("loom %s is not kept yet: %s", self.kept.name, error)
            except StoreError as error:
                _log.warning("loom %s cannot be kept any more: %s", self.kept.name, error)
                self._unkept = None

    async def make_durable(self, nodes: Sequence[Heddle]) -> None:
        """As `append_tokens`, with the nodes of other calls in one write; without the lock."""
        if nodes:
            await self._lasting.do(nodes)

    async def _make_all_durable(self, those: list[Sequence[Heddle]]) -> None:
        await self.append_tokens([node for nodes in those for node in nodes])

    async def append_tokens(self, nodes: Sequence[Heddle]) -> None:
        """Keep what is new in nodes that grow, or have ended just now. The caller holds the lock.

        Where that cannot be, it is tried again with the next tokens, and with the commit.
        """
        if not nodes:
            return
        try:
            await self.call(partial(self.kept.append, nodes))
        except LeaseLost as error:
            _log.warning("loom %s: %s", self.kept.name, error)
            self._lose()
        except (StoreError, QueueFull) as error:
            _log.warning("tokens are not durable yet: %s", error)

    def release(self) -> None:
        """End its readers: they come again, and are told the state anew. Its tree may go."""
        self.pins.clear()
        self.events.end()
        self.feed.end()
        if not self.growing:
            self.kept.loom.close()

    async def close(self) -> None:
        """End its readers and its own work, and let go of the tree."""
        self.events.end()
        self.feed.end()
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self._retry_commit()
        with suppress(StaleHandle):
            self.kept.loom.close()
        self.pins.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it now, and nothing of it is pinned."""
        is_used = self.growing or self.n_users or self.n_readers or self.lock.locked() or self.pins
        return not is_used and self._unkept is None

    @property
    def n_readers(self) -> int:
        """How many listen to it."""
        return self.events.n_readers + self.feed.n_readers
