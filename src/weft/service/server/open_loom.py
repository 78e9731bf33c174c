"""A loom that is open in this process: one tree, shared by all requests and jobs.

Every access to a tree holds its lock. Blocking work (the database, a long walk) runs in a thread
while the caller holds the lock. Jobs add nodes in the event loop.
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
from ...loom.author_note import AUTHOR_NOTE
from ...loom.node import is_below
from ..store.change import Change
from ..store.stored_loom import StoredLoom
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
FRESH_S = 0.05  # seconds for which rows read from the database count as current
_FLUSH_S = 0.5  # seconds between two writes of the tokens of growing nodes
_MAX_FULL_NODES = 200  # changes with more nodes are published without their content
_SAVED_LATER = (
    "Keep the server running and fix its database. Generated nodes are saved automatically once it"
    " is reachable; edits must be repeated."
)
# Kinds of changes, by the only field of a node that they change.
ANNOTATION_KINDS = {"score": "score", "rating": "rating", "meta": "note"}
# Kinds of changes that keep nodes at their position.
_IN_PLACE = {"edit", "grow", AUTHOR_NOTE, *ANNOTATION_KINDS.values()}


class ExpectedRevision(NamedTuple):
    """A node to edit, and the loom's revision in which the author of the edit has read it.

    `rev` is None if the request does not name a revision; nothing is checked then.
    """

    node: Heddle
    rev: int | None


class OpenLoom:
    """A loom that is open in this process. Every access to its tree holds `lock`.

    stored: the stored loom. lm: its model; None if the loom is open for reading only.
    growing: the growth tasks in progress.
    jobs: the jobs that these tasks belong to.
    events: log of the loom's changes.
    feed: log of these changes and of the events of its jobs, each with its `job`.
    pins: nodes whose KV is pinned.
    first_rev: the loom's revision when it was opened here.
    """

    def __init__(self, stored: StoredLoom, lm: LM | None, ticker: Ticker) -> None:
        self.stored = stored
        self.lm = lm
        self.ticker = ticker
        self.lock = asyncio.Lock()
        start_id = int(1000 * time.time())  # above any event id that an earlier log can have used
        self.events = EventLog(
            self._snapshot, max_events=1024, on_event=self.notify, start_id=start_id
        )
        self.feed = EventLog(self._feed_snapshot, start_id=start_id)
        self.jobs: list[ServerJob] = []
        self.growing: list[GrowthTask] = []
        self.pins = NodePins()
        self.used = time.monotonic()
        self.n_users = 0
        self.first_rev = stored.rev
        self.is_stale = False  # the tree differs from the database: reopen the loom
        self._numbering = Coalescer(self.lock, self._number_nodes)
        self._appending = Coalescer(self.lock, self._append_all)
        self._committing = Coalescer(self.lock, self._commit_growth)
        self._synced = 0.0
        # The name and title last published; another process may change those of `stored`.
        self._label = stored.name, stored.title
        self._changed_at: dict[str, int] = {}  # node id to the revision that last changed it
        self._children_changed_at: dict[str, int] = {}
        self._removed_at: dict[int, int] = {}  # number of a removed node to the revision
        self._flusher: asyncio.Task[None] | None = None
        self._uncommitted: Attribution | None = None  # of a growth whose commit failed

    def _snapshot(self) -> dict[str, Any]:
        """Return the state that readers of `events` get if they have missed some."""
        return {"loom": self.stored.id, "rev": self.stored.rev}

    def _feed_snapshot(self) -> dict[str, Any]:
        """Return the state that readers of `feed` get: that of the loom and of its jobs."""
        return {**self._snapshot(), "jobs": [job.snapshot() for job in self.jobs]}

    def notify(self, name: str, data: dict[str, Any], job: str | None = None) -> None:
        """Add an event to `feed`, if it has readers.

        name, data: of the event. job: id of the job that the event belongs to; None without one.
        """
        if self.feed.n_readers:
            self.feed.put(name, data if job is None else {"job": job, **data})
        else:
            self.feed.skip()

    # Reading and changing

    async def call(self, work: Callable[[], Value]) -> Value:
        """Run blocking work in a thread and return its result. The caller holds the lock.

        A cancellation of the caller takes effect after the work has ended.
        """
        future = asyncio.get_running_loop().run_in_executor(None, work)
        while True:
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                # The thread continues, so the lock must not be released before it ends.
                if future.done():
                    raise
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
                if future.done():
                    raise

    async def run_and_publish(self, work: Callable[[], Change]) -> Change:
        """Run blocking work like `call`, and publish the change that it returns.

        The change is published even if the caller is cancelled meanwhile.
        """
        done: list[Change] = []

        def work_and_follow_pins() -> Change:
            done.append(change := work())
            self.pins.follow(self.stored, change)
            return change

        try:
            return await self.call(work_and_follow_pins)
        finally:
            for change in done:
                self.publish(change)

    @asynccontextmanager
    async def released_lock(self) -> AsyncIterator[None]:
        """Release the lock while the model works; the block's end acquires it again."""
        self.lock.release()
        try:
            yield
        finally:
            cancelled: asyncio.CancelledError | None = None
            while True:
                try:
                    await self.lock.acquire()
                    break
                except (
                    asyncio.CancelledError
                ) as error:  # the caller must hold the lock again, even if cancelled
                    cancelled = error
            if cancelled is not None:
                raise cancelled

    async def sync(self, *, now: bool = False) -> None:
        """Merge changes of other processes; the caller holds the lock.

        now: even if that was done within the last `FRESH_S` seconds.
        """
        if now or time.monotonic() - self._synced > FRESH_S:
            await self.run_and_publish(self.stored.sync)
            if (self.stored.name, self.stored.title) != self._label:
                self._label = name, title = self.stored.name, self.stored.title
                event = {"loom": self.stored.id, "name": name, "title": title}
                self.events.put("renamed", event)
            self._synced = time.monotonic()

    async def change(
        self,
        kind: str,
        edit: Callable[[], Any],
        actor: str,
        expected: ExpectedRevision | None = None,
    ) -> Change:
        """Edit the tree and commit it as one operation; the caller holds the lock.

        Args:
            kind: the operation in one word, for the log.
            edit: changes the tree; runs in a thread.
            actor: the author, for the log.
            expected: node that must not have been changed since a revision; None means no check.

        Raises:
            Exception: the error of `edit`; the tree is unchanged then.
            StoreError: the commit failed.
            Conflict: another server changed the node in `expected` before the commit.
        """
        await self.commit_finished()
        unchanged = self.unchanged(expected)

        def work() -> Change:
            edit()
            return self.stored.commit(kind, actor=actor, leave=self.ended(), unchanged=unchanged)

        try:
            return await self.run_and_publish(work)
        except Exception as error:
            await self._revert_edit(error)
            raise

    async def _revert_edit(self, error: Exception) -> None:
        """Revert the edit that failed with `error`, so that the next commit does not store it."""
        if isinstance(error, Conflict):
            self._synced = 0.0  # the next read merges the other server's change
        if isinstance(error, LeaseLost):
            self.is_stale = True
        elif await self.call(self.stored.is_changed):
            if self.lm is None:
                self.is_stale = True
            else:  # uncommitted growth exists only in this tree, so it must survive
                await self.call(self.stored.revert)

    def ended(self, but: Sequence[GrowthTask] = ()) -> list[Heddle]:
        """Return the ended nodes of growth tasks that their own job will commit.

        but: tasks whose nodes are left out.
        """
        return [node for each in self.growing if each not in but for node in each.ended]

    async def commit(self, author: Attribution, of: Sequence[GrowthTask] = ()) -> None:
        """Commit the ended nodes of growth tasks as one operation; the caller holds the lock.

        Args:
            author: author and kind of the operation, for the log.
            of: the tasks. Ended nodes of other tasks are left for their own commits.

        Raises: StoreError.
        """
        leave, (kind, actor, act, model) = self.ended(of), author

        def commit() -> Change:
            return self.stored.commit(kind, actor=actor, act=act, model=model, leave=leave)

        try:
            await self.run_and_publish(commit)
        except LeaseLost:
            self._interrupt_growth()
            raise
        except StoreUnavailable as error:
            self._uncommitted = author
            self._start_flushing()
            # NOTE: a failed edit is reverted; generated nodes stay in memory until they are saved.
            why = f"generated nodes are in the server's memory and not saved yet: {error}"
            raise StoreUnavailable(why, hint=_SAVED_LATER) from error
        except StoreError:  # the loom was deleted or is broken: a retry cannot succeed
            self.is_stale = True
            raise
        self._uncommitted = None

    async def commit_growth(self, task: GrowthTask) -> None:
        """Commit the nodes of an ended growth task.

        Concurrent calls for tasks of the same author become one commit.
        The caller must not hold the lock. Raises: StoreError.
        """
        await self._committing.do(task)

    async def _commit_growth(self, tasks: list[GrowthTask]) -> None:
        """Commit the nodes of tasks with the same author; the work of a `Coalescer`."""
        for author in dict.fromkeys(each.author.alone for each in tasks):
            # Tasks without growing nodes join the commit.
            over = [each for each in self.growing if each in tasks or not each.nodes]
            own = [each for each in over if each.author.alone == author]
            pending = [branch for each in own for branch in each.growth.branches]
            if not all(self.stored.has(branch.child) for branch in pending):
                await self.commit(own[0].author if len(own) == 1 else author, own)

    async def commit_finished(self) -> None:
        """Commit the ended nodes of each growth task as a separate operation.

        This comes before an edit, whose commit would otherwise contain these nodes.
        The caller holds the lock. Raises: StoreError.
        """
        if self._uncommitted is not None:
            await self.commit(self._uncommitted)
        for task in list(self.growing):
            if not all(map(self.stored.has, task.ended)):
                await self.commit(task.author, [task])

    def _interrupt_growth(self) -> None:
        """Interrupt all growth: another server has taken over the loom."""
        self.is_stale = True
        for task in list(self.growing):
            task.cancel(reason="interrupted")

    def publish(self, change: Change) -> None:
        """Record the revision at which each node changed, and send events about the change."""
        others = change.others
        if others is not None:
            self._publish_changes(change.rev, "sync", *others)
        self._publish_changes(change.rev, change.kind, change.added, change.changed, change.removed)

    def _publish_changes(
        self,
        rev: int,
        kind: str,
        added: Iterable[Heddle],
        changed: Iterable[Heddle],
        removed: Iterable[str],
    ) -> None:
        """Send events about added, changed and removed nodes.

        rev: the loom's new revision. kind: the operation.
        """
        added, changed, removed = list(added), list(changed), list(removed)
        if not (added or changed or removed):
            return
        numbers = self.stored.numbers()
        for node in (*added, *changed):
            self._changed_at[node.id] = rev
            self._removed_at.pop(numbers.get(node.id, -1), None)
        for node_id in removed:
            self._changed_at[node_id] = rev
            self._removed_at[numbers.get(node_id, -1)] = rev
        parents = (node.parent for node in (*added, *(() if kind in _IN_PLACE else changed)))
        parents_by_id = {parent.id: parent for parent in parents if parent is not None}
        self._children_changed_at.update(dict.fromkeys(parents_by_id, rev))
        is_full = len(added) + len(changed) <= _MAX_FULL_NODES and self.n_readers
        self.events.put(
            "change",
            {
                "rev": rev,
                "kind": kind,
                "added": serialize_nodes(self, added) if is_full else [],
                "changed": serialize_nodes(self, changed) if is_full else [],
                "removed": [numbers.get(node_id, -1) for node_id in removed],
                "children": {
                    str(self.number(parent)): list(map(self.number, self.children_of(parent)))
                    for parent in (parents_by_id.values() if is_full else ())
                },
                "whole": bool(is_full),
            },
        )

    def since(self, rev: int) -> tuple[set[str], list[int]] | None:
        """Return what changed after a revision: (ids of changed nodes, numbers of removed nodes).

        A node whose list of children changed counts as changed.
        None if the loom was opened here after this revision, or if `rev` is in the future.
        """
        if not self.first_rev <= rev <= self.stored.rev:
            return None
        tables = (self._changed_at, self._children_changed_at)
        changed = {node_id for table in tables for node_id, at in table.items() if at > rev}
        return changed, [number for number, at in self._removed_at.items() if at > rev]

    def check_rev(self, node: Heddle, rev: int | None) -> None:
        """Raise Conflict if a node was changed after revision `rev`. None means no check.

        rev: the loom's revision in which the author of an edit has read the node.
        """
        if rev is not None and (current := self._changed_at.get(node.id, self.first_rev)) > rev:
            raise Conflict(
                f"node {self.stored.number(node)} was changed in revision {current}, after revision"
                f" {rev}, the last one you have read",
                rev=self.stored.rev,
                hint="read the node again and repeat the edit",
            )

    def unchanged(self, expected: ExpectedRevision | None) -> list[Heddle]:
        """Return the nodes that no other server may change before the commit.

        The list is for `StoredLoom.commit`; it is empty without an expected revision.
        Raises: Conflict if the node was changed after that revision already.
        """
        if expected is None or expected.rev is None:
            return []
        self.check_rev(*expected)
        return [expected.node]

    # Nodes

    def node(self, given: str | int) -> Heddle:
        """Return a node by number or id. Raises: NotFound.

        Growing nodes, and ended ones before their commit, are included.
        """
        name, numbers = str(given), self.stored.numbers()
        for task in self.growing:
            for child in task.uncommitted:
                matches = child.id == name or str(numbers.get(child.id)) == name
                if matches and is_below(child, self.stored.loom):
                    return child
        try:
            return self.stored.node(given)
        except ConfigError as error:
            message = f"there is no node {str(given)!r:.80} in the loom {self.stored.name}"
            hint = f"GET /api/v1/looms/{self.stored.id}/nodes lists them"
            raise NotFound(message, what="node", hint=hint) from error

    def number(self, node: Heddle) -> int:
        """Return a node's number; -1 if it is not saved yet."""
        try:
            return self.stored.number(node)
        except TreeError:
            return -1

    def is_growing(self, node: Heddle) -> bool:
        """Return True if this node itself is being generated. Growing children do not count."""
        return any(node in task.nodes for task in self.growing)

    def check_not_growing(self, node: Heddle) -> None:
        """Raise Conflict if this node itself is being generated. Growing children do not count."""
        if self.is_growing(node):
            self.check_nothing_grows(node)

    def check_nothing_grows(self, node: Heddle) -> None:
        """Raise Conflict if this node is being generated, or if children of it are."""
        for task in self.growing:
            if node in task.nodes or any(node is each for each in task.parents):
                raise Conflict(
                    f"node {self.number(node)} is being grown",
                    rev=self.stored.rev,
                    hint="wait until its job has ended, or cancel that",
                )

    def drop_growing(self, top: Heddle) -> None:
        """Cancel the growth of all descendants of a node, and discard their tokens.

        Use it before `top` is removed. `top` itself is not cancelled; see `cancel_node`.
        """
        for task in self.growing:
            task.drop_below(top)

    def cancel_node(self, node: Heddle) -> None:
        """Cancel one growing node and discard its tokens."""
        for task in self.growing:
            task.drop([node])

    def children_of(self, node: Heddle) -> list[Heddle]:
        """Return a node's children, including growing ones, in their final order."""
        children = list(node.children)
        for task in self.growing:
            task.insert_growing(node, children)
        return children

    # Growing

    def register_growth(self, task: GrowthTask) -> None:
        """Add a task to `growing`, and start the loop that writes new tokens to the database."""
        self.growing.append(task)
        self._start_flushing()

    def _start_flushing(self) -> None:
        """Start the task of `_flush_loop` if it does not run."""
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_loop())

    async def number_new(self, task: GrowthTask) -> None:
        """Save the new nodes of a growth task, which gives them their numbers.

        Concurrent calls share one write. The caller must not hold the lock.
        Raises: StoreError; Conflict if a parent was removed meanwhile. Then nothing grows.
        """
        try:
            await self._numbering.do(task)
            if task.parent_removed:
                raise Conflict(
                    "the node to grow from was removed meanwhile",
                    rev=self.stored.rev,
                    code="node_removed",
                    hint="undo or redo restores it",
                )
        except BaseException:
            task.growth.abandon("cancelled")
            raise

    async def _number_nodes(self, tasks: list[GrowthTask]) -> None:
        """Save the new nodes of several tasks in one write; the work of a `Coalescer`."""
        for task in tasks:
            task.parent_removed = not all(is_below(node, self.stored.loom) for node in task.nodes)
        nodes = [node for task in tasks if not task.parent_removed for node in task.nodes]
        await self.call(partial(self.stored.append, nodes))

    def unregister_growth(self, task: GrowthTask) -> None:
        """Remove a task from `growing`, after its commit."""
        self.growing.remove(task)
        task.is_over = True
        self.used = time.monotonic()

    async def _flush_loop(self) -> None:
        """Write new tokens of growing nodes to the database from time to time, while any grow."""
        try:
            while self.growing or self._uncommitted is not None:
                await asyncio.sleep(_FLUSH_S)
                async with self.lock:
                    await self._retry_commit()
                    nodes = [node for each in self.growing for node in each.uncommitted]
                    await self.append_tokens(nodes)
        finally:
            self._flusher = None

    async def _retry_commit(self) -> None:
        """Retry a commit that failed because the database was unavailable."""
        if self._uncommitted is not None:
            try:
                await self.commit(self._uncommitted)
            except StoreUnavailable as error:
                _log.warning("loom %s is not saved yet: %s", self.stored.name, error)
            except StoreError as error:
                _log.warning("loom %s can no longer be saved: %s", self.stored.name, error)
                self._uncommitted = None

    async def make_durable(self, nodes: Sequence[Heddle]) -> None:
        """Write new tokens to the database like `append_tokens`; concurrent calls share one write.

        The caller must not hold the lock.
        """
        if nodes:
            await self._appending.do(nodes)

    async def _append_all(self, batches: list[Sequence[Heddle]]) -> None:
        """Write the new tokens of several calls at once; the work of a `Coalescer`."""
        await self.append_tokens([node for batch in batches for node in batch])

    async def append_tokens(self, nodes: Sequence[Heddle]) -> None:
        """Write the new tokens of growing or just ended nodes to the database.

        The caller holds the lock. A failed write is logged; a later write or the commit retries it.
        """
        if not nodes:
            return
        try:
            await self.call(partial(self.stored.append, nodes))
        except LeaseLost as error:
            _log.warning("loom %s: %s", self.stored.name, error)
            self._interrupt_growth()
        except (StoreError, QueueFull) as error:
            _log.warning("tokens are not saved yet: %s", error)

    def release(self) -> None:
        """End the event streams, drop the pins, and close the tree unless nodes are growing.

        It is called when this object is replaced or out of date. Readers reconnect to the next one.
        """
        self.pins.clear()
        self.events.end()
        self.feed.end()
        if not self.growing:
            self.stored.loom.close()

    async def close(self) -> None:
        """End the event streams, retry a commit that failed, and close the tree."""
        self.events.end()
        self.feed.end()
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self._retry_commit()
        with suppress(StaleHandle):
            self.stored.loom.close()
        self.pins.clear()

    @property
    def is_idle(self) -> bool:
        """True if nothing uses the loom and no KV is pinned in it."""
        is_used = self.growing or self.n_users or self.n_readers or self.lock.locked() or self.pins
        return not is_used and self._uncommitted is None

    @property
    def n_readers(self) -> int:
        """Number of connected readers of the event streams."""
        return self.events.n_readers + self.feed.n_readers
