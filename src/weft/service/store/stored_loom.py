"""An open loom that is stored in the database: commit, append, merge, undo and redo.

Every change is written as one operation of the log, after merging the changes of other processes.
Generated nodes are never lost. If a process adds nodes below a node that another one removes, the
ancestors of the new nodes stay or are restored. If two processes change the same value, the later
commit wins, and the log contains both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.sched.driver import deferred_interrupt
from ...errors import ConfigError, Conflict, LeaseLost, StoreError, TreeError
from ...lm.results import Delta
from ...loom import Heddle, Loom
from ...loom.node import in_call_order
from . import tables
from .change import Change
from .commit import PendingCommit, build_commit, count_nodes, restore_ancestors, set_removed, touch
from .database import Database
from .heartbeats import ProcessHeartbeat, find_dead, process_of
from .in_progress import (
    InProgressNode,
    act_of_processes,
    add_in_progress,
    append_chunks,
    find_orphaned,
    finish_nodes,
    interrupt_nodes,
    newly_finished,
    save_finish,
)
from .leases import LeaseHolder
from .log import DONE, UNDONE, Operation, Steps
from .metadata import LoomMetadata
from .records import NodeRecord, PageOptions, page
from .rows import Values, is_db_text, select_nodes
from .snapshot import MergedChanges, Snapshot
from .stream_writer import persist_stream
from .undo import (
    apply,
    drop_undone,
    last_removal,
    log_operation,
    next_in_log,
    still_removed,
)

_nodes, _operations = tables.nodes, tables.operations
P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(
    work: Callable[Concatenate[StoredLoom, P], R],
) -> Callable[Concatenate[StoredLoom, P], R]:
    """Run a method under the lock, and delay Ctrl-C until it returns: rows and tree must agree."""

    @wraps(work)
    def run(stored: StoredLoom, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with deferred_interrupt(), stored._lock:
            return work(stored, *args, **kwargs)

    return run


class StoredLoom:
    """A loom in the database: `loom` is the live tree, and `commit` writes its changes.

    Not thread-safe. Any number of processes can have the same loom open.
    """

    def __init__(self, database: Database, writer: ProcessHeartbeat, row: Any, loom: Loom) -> None:
        """Bind a tree to the rows of a loom; see `Library.create` and `Library.open`."""
        self.loom = loom
        self.id: str = row.id
        self.name: str = row.name
        self.title = LoomMetadata.from_json(row.head).title
        self.rev = -1
        self.is_removed = False  # at the last read; a removed loom can be restored
        self._database = database
        self._writer = writer
        self._key: int = row.key
        self._select_row = sa.select(tables.looms).where(tables.looms.c.key == self._key)
        self._snapshot = Snapshot(loom)
        self._in_progress: dict[str, InProgressNode] = {}
        self._prompt = loom.user_prompt  # as in the loom's row
        lease_s = writer.lease_s
        self._lease = None if lease_s is None else LeaseHolder(database, self.id, lease_s)
        self._lock = threading.RLock()  # `StreamWriter` appends from another thread

    # Node numbers

    def number(self, node: Heddle) -> int:
        """Return a node's number, which is unique in its loom and never reused. The root is 0.

        Raises: TreeError for a node that is not saved yet.
        """
        number = self._snapshot.numbers.get(node.id)
        if number is None:
            raise TreeError(f"the node {node.id} is not saved yet: commit gives it its number")
        return number

    def numbers(self) -> Mapping[str, int]:
        """Return a live view of node numbers by node id, also of removed nodes."""
        return MappingProxyType(self._snapshot.numbers)

    def node(self, name: str | int) -> Heddle:
        """Return the node with this number or id. Raises: ConfigError if there is none.

        name: a number (also as text), or an id.
        """
        text = str(name)
        if text.isdecimal() and len(text) <= 9:
            return self._by_number(int(text))
        saved = self._snapshot.saved.get(text)
        if saved is not None:
            return saved.node
        try:
            return self.loom.find(text)
        except TreeError:
            raise ConfigError(
                f"NODE is {name!r}; allowed is a number, 0 (the prompt) to "
                f"{max(self._snapshot.ids, default=0)}, or an id",
                hint="weft tree shows the nodes",
            ) from None

    def _by_number(self, number: int) -> Heddle:
        """Return the node with this number. Raises: ConfigError if there is none."""
        saved = self._snapshot.saved.get(self._snapshot.ids.get(number, ""))
        if saved is not None:
            return saved.node
        row = self._database.read(
            lambda connection: connection.execute(
                sa.select(tables.looms.c.next_number).where(tables.looms.c.key == self._key)
            ).first()
        )
        last = row.next_number - 1 if row is not None else 0
        if number > last:
            raise ConfigError(
                f"there is no node {number}; allowed is 0 (the prompt) to {last}",
                hint="weft tree shows the nodes",
            )
        raise ConfigError(
            f"node {number} is not in the loom any more", hint="weft tree shows the nodes"
        )

    def nodes(self, **which: Unpack[PageOptions]) -> list[NodeRecord]:
        """Return nodes as plain records from the rows, in the order of their numbers.

        Nodes that are being generated are included.

        Keywords:
            under: number or id of a node. Only this node and all nodes below it.
            depth: maximum level below `under` (or the root); 0 is only that node.
            since: only nodes changed after this revision, including nodes removed since then.
            limit: maximum number of records (100).
            after: only higher numbers than this one; for the next page.

        Raises: ConfigError for a node that is not in the loom.
        Cost: O(limit); with `under`, O(nodes below), without their tokens.
        """
        return self._database.read(lambda connection: page(connection, self._key, **which))

    # Writing

    def commit(
        self,
        kind: str,
        *,
        actor: str = "",
        act: str | None = None,
        model: str | None = None,
        leave: Iterable[Heddle] = (),
        unchanged: Iterable[Heddle] = (),
    ) -> Change:
        """Write all changes of the tree as one operation, after merging those of other processes.

        The changes are durable when this returns. Without changes, nothing is written.

        Args:
            kind: the operation in one word, for display: "grow", "edit", "remove".
            actor: who did it, for display.
            act: name of a group of commits, such as the rounds of a search; see `new_act`.
                Consecutive commits of a group are undone and redone together. None: no group.
            model: the model that generated the new nodes; None means the loom's.
            leave: new nodes to leave uncommitted, because another commit will write them. `append`
                has given them their numbers.
            unchanged: nodes that no other process may have changed since the last merge.

        Returns: the nodes that the commit has added, changed and removed, and the merged changes.

        Raises:
            StoreError: nothing was written.
            LeaseLost: another server has taken over the loom; this tree is out of date.
            ConfigError: a node's meta is not JSON.
            Conflict: another process changed one of `unchanged`; nothing was written or merged.

        Cost: O(nodes) comparisons in memory. Only rows of changed nodes are read and written.
        """
        return self._commit(kind, actor, {}, act, model, leave, unchanged)

    def new_act(self) -> str:
        """Return a name for a group of commits (`act=`) of this process.

        Other processes cannot undo the group until this process closes its library or exits.
        """
        return self._database.write(self._writer.new_act)

    def bookmark(
        self,
        node: Heddle,
        label: str | None,
        *,
        actor: str = "",
        unchanged: Iterable[Heddle] = (),
    ) -> Change:
        """Set a node's bookmark, or remove it (None), and commit.

        Other uncommitted changes are written in the same operation. If the node is new, they are
        committed before it.

        Args:
            label: the text of the bookmark.
            actor: who did it, for display.
            unchanged: nodes that no other process may have changed since the last merge.

        Raises: ConfigError for a label that is not a text without zero bytes. Conflict if another
        process removed the node. Other errors as for `commit`.
        """
        if label is not None and not (isinstance(label, str) and is_db_text(label)):
            raise ConfigError(f"a bookmark is {label!r:.80}; allowed is a text without zero bytes")
        if node.id not in self._snapshot.saved:
            self.commit("edit")
            self.number(node)
        return self._commit("bookmark", actor, {node.id: label}, unchanged=unchanged)

    def bookmarks(self) -> dict[int, str]:
        """Return the text of each bookmark, by the number of its node."""
        saved = self._snapshot.saved.values()
        return {each.number: each.bookmark for each in saved if each.bookmark is not None}

    def has(self, node: Heddle) -> bool:
        """Return True if a commit has written this node. `append` alone is not enough."""
        return node.id in self._snapshot.saved

    def is_durable(self, node: Heddle) -> bool:
        """Return True if a finished node would survive a crash of this process.

        That is, it is committed, or `append` has saved its last tokens and its finish reason.
        """
        growing = self._in_progress.get(node.id)
        return self.has(node) or (growing is not None and growing.is_finish_saved)

    @_exclusive
    def is_changed(self) -> bool:
        """Return True if the tree has uncommitted changes, apart from generated nodes.

        Generated nodes in progress, which `append` saves, do not count. Cost: O(nodes).
        """
        try:
            difference = self._snapshot.difference()
        except ConfigError:  # a meta that cannot be saved differs from the saved one
            return True
        difference.exclude(self._in_progress.keys())
        return bool(difference) or self.loom.user_prompt != self._prompt

    @_exclusive
    def revert(self) -> None:
        """Discard uncommitted changes of the tree.

        Generated nodes that `append` has saved stay in the tree, for the next commit.

        Raises: TreeError for a loom without its model; open it again instead.
        """
        if self.loom.lm is None:
            raise TreeError("a loom without its model cannot be reverted: open it again")
        self._snapshot.revert(self._in_progress)
        self.loom.user_prompt = self._prompt

    @_exclusive
    def _commit(
        self,
        kind: str,
        actor: str,
        bookmarks: dict[str, str | None],
        act: str | None = None,
        model: str | None = None,
        leave: Iterable[Heddle] = (),
        unchanged: Iterable[Heddle] = (),
    ) -> Change:
        """Merge changes of other processes, write those of the tree, and return all of them."""
        others, left = MergedChanges([], [], []), {each.id for each in leave}
        same = {each.id for each in unchanged}
        pending = self._database.write(
            lambda connection: self._write(
                connection, kind, actor, bookmarks, others, act, model, left, same
            )
        )
        merged = others if any(others) else None
        if pending is None:
            return Change(self.rev, kind, [], [], [], merged)
        self._accept(pending)
        return Change(self.rev, kind, pending.added, pending.changed, pending.removed, merged)

    def _write(
        self,
        connection: Connection,
        kind: str,
        actor: str,
        bookmarks: dict[str, str | None],
        others: MergedChanges,
        act: str | None = None,
        model: str | None = None,
        left: Collection[str] = (),
        unchanged: Collection[str] = (),
    ) -> PendingCommit | None:
        """Merge and write in a transaction; arguments as for `commit`.

        Returns: None if there is nothing to write.
        """
        row = self._lock_row(connection)
        self._check_unchanged(connection, row, unchanged)
        if self._lease is not None and self._in_progress:
            is_finished = all(
                g.is_finished and g.node.id not in left for g in self._in_progress.values()
            )
            self._lease.renew(connection, is_finished=is_finished)
        self._merge(connection, row, others)
        grown = [each.node for each in self._in_progress.values() if each.is_finished]
        self._snapshot.adopt([node for node in grown if node.id not in left])
        difference = self._snapshot.difference()
        difference.exclude(left)
        for node_id, label in bookmarks.items():
            saved = self._snapshot.saved.get(node_id)
            if saved is None and node_id in difference.positions:
                continue  # a new node is inserted with its bookmark
            if saved is None:
                raise Conflict(
                    f"node {self._snapshot.numbers.get(node_id, node_id)} has been removed by"
                    " another process, so it cannot be bookmarked",
                    rev=self.rev,
                    code="node_removed",
                    hint="undo restores it",
                )
            if saved.bookmark != label:
                difference.changed.setdefault(node_id, set()).add("bookmark")
        failed = [
            each
            for each in self._in_progress.values()
            if each.is_finished and each.node.id not in difference.positions
        ]
        head = LoomMetadata.from_loom(self.loom, title=self.title)
        if not (difference or failed or head.to_json() != row.head):
            return None
        is_prompt_changed = head.user_prompt != self._prompt
        pending = build_commit(
            connection, self._database, self._snapshot, difference, row, bookmarks
        )
        finish_nodes(connection, self._key, pending, failed, self._in_progress)
        if difference or is_prompt_changed:
            drop_undone(connection, self._key)
            prompt = (self._prompt, head.user_prompt) if is_prompt_changed else None
            steps, is_first = pending.steps._replace(prompt=prompt), row.rev == 0
            is_grown = any(node.params is not None for node in pending.added)
            more = {"act": act, "model": (model or head.load) if is_grown else None}
            log_operation(
                connection, self._key, kind, actor, steps, pending.rev, is_first=is_first, **more
            )
        touch(
            connection,
            self._key,
            rev=pending.rev,
            next_number=pending.next_number,
            n_nodes=tables.looms.c.n_nodes + len(pending.steps.added) - len(pending.steps.removed),
            **head.columns(),
        )
        return pending

    def _check_unchanged(self, connection: Connection, row: Any, ids: Collection[str]) -> None:
        """Raise Conflict if another process has changed one of these nodes since the last merge.

        row: the loom's locked row. ids: ids of the nodes.
        """
        if not ids or row.rev == self.rev:
            return
        number = connection.execute(
            sa.select(_nodes.c.number).where(
                _nodes.c.loom == self._key, _nodes.c.id.in_(ids), _nodes.c.rev > self.rev
            )
        ).scalar()
        if number is not None:
            raise Conflict(
                f"node {number} was changed by another process",
                rev=row.rev,
                hint="read the node again, then repeat the change",
            )

    def _accept(self, pending: PendingCommit) -> None:
        """Take over the values of a transaction that has succeeded."""
        snapshot = self._snapshot
        for node_id in pending.removed:
            snapshot.remove(node_id, growing=bool(self._in_progress))
        for node_id, saved in pending.saved.items():
            snapshot.saved[node_id] = saved
            snapshot.set_number(node_id, saved.number)
        for node_id in pending.ended:
            self._in_progress.pop(node_id, None)
        if not self._in_progress:
            snapshot.removed.clear()
        self.rev, self._prompt = pending.rev, pending.prompt

    # InProgressNode

    @_exclusive
    def append(self, nodes: Iterable[Heddle]) -> None:
        """Save new tokens of nodes that are being generated, durable when this returns.

        This gives the nodes their numbers. It is not an operation of the log: the commit follows
        when the nodes are finished. If this process exits before, unfinished nodes become
        "interrupted" when the loom is opened next.

        nodes: from a `stream` (`Delta.node`); they need not be in the tree yet.
        Cost: O(new tokens).
        """
        wanted = {node.id: node for node in nodes if node.id not in self._snapshot.saved}
        new = [node for node in in_call_order(wanted.values()) if node.id not in self._in_progress]
        for node in new:
            parent = node.parent
            if parent is None or parent.id not in self._snapshot.saved:
                self.commit("edit")
                break
        started, chunks, finished, rev = self._database.write(
            lambda connection: self._append(connection, wanted, new)
        )
        self._in_progress.update(started)
        for growing in started.values():
            self._snapshot.set_number(growing.node.id, growing.number)
        for growing, chunk in chunks:
            growing.mark_saved(chunk)
        for growing in finished:
            growing.is_finish_saved = True
        self.rev = rev if self.rev == rev - 1 else self.rev

    def follow(
        self, deltas: Iterable[Delta], *, kind: str = "grow", actor: str = ""
    ) -> Generator[Delta, None, None]:
        """Yield the deltas of a `stream`, and save their tokens at most a second later.

            for delta in stored.follow(node.stream(n=4, max_tokens=200)):
                print(stored.number(delta.node), delta.text)

        The nodes are committed at the end, also after an error. Do not change the tree meanwhile.

        kind, actor: of the commit, as for `commit`.
        """
        return persist_stream(self, deltas, kind, actor)

    def _append(
        self, connection: Connection, wanted: Mapping[str, Heddle], new: list[Heddle]
    ) -> tuple[
        dict[str, InProgressNode], list[tuple[InProgressNode, Values]], list[InProgressNode], int
    ]:
        """Write new tokens in a transaction.

        Returns: new nodes in progress by id, saved chunks, nodes whose finish was saved, and the
        next number.
        """
        row = self._lock_row(connection)
        writer = self._writer.register(connection)
        if new or self._in_progress:
            row = self._acquire_lease(connection, row, writer)
        started, next_number = add_in_progress(
            connection, self._database, self._snapshot, row, new, writer
        )
        in_progress = {**self._in_progress, **started}
        unsaved = [
            in_progress[each]
            for each in wanted
            if each in in_progress and not in_progress[each].is_finish_saved
        ]
        finished = newly_finished(unsaved)
        chunks = append_chunks(connection, self._database, row, unsaved)
        save_finish(connection, self._snapshot.params, row, finished)
        if not (started or chunks or finished):
            return started, chunks, finished, row.rev
        touch(connection, self._key, rev=row.rev + 1, next_number=next_number)
        return started, chunks, finished, row.rev + 1

    def _acquire_lease(self, connection: Connection, row: Any, writer: str) -> Any:
        """Acquire or renew the lease of the loom; do nothing if the library uses no leases.

        row: the loom's locked row. writer: the id of this process.
        Returns the row, read again if nodes of the previous owner were interrupted.
        """
        if self._lease is None:
            return row
        if self._in_progress:
            self._lease.renew(connection, is_finished=False)
            return row
        former = self._lease.acquire(
            connection,
            writer,
            lambda process_id: bool(find_dead(connection, {process_id}, self._database)),
        )
        if former:  # the previous owner was too slow, or has exited on another machine
            self._end(connection, row, _nodes.c.writer == former)
            row = self._lock_row(connection)
        return row

    def _end_orphans(self) -> None:
        """Give nodes in progress whose process has exited the finish reason "interrupted"."""
        own = self._writer.id
        if not self._database.read(
            lambda connection: find_orphaned(connection, self._database, self._key, own)
        ):
            return

        def work(connection: Connection) -> None:
            row = self._lock_row(connection)
            dead = find_orphaned(connection, self._database, self._key, own)
            if dead:
                self._end(connection, row, _nodes.c.writer.in_(dead))

        self._database.write(work)

    def _end(self, connection: Connection, row: Any, where: sa.ColumnElement[bool]) -> None:
        """Interrupt the nodes in progress that `where` selects, as one operation of the log."""
        act = act_of_processes(connection, self._key, where)
        steps = interrupt_nodes(connection, row, where)
        if steps.added:
            log_operation(connection, self._key, "interrupted", "", steps, row.rev + 1, act=act)
        touch(
            connection,
            self._key,
            rev=row.rev + 1,
            n_nodes=tables.looms.c.n_nodes + len(steps.added),
        )

    def close(self) -> None:
        """Interrupt the nodes that this process generates, and close the tree; idempotent.

        Uncommitted changes are not saved.
        """
        if self._in_progress:
            with suppress(LeaseLost):  # the new owner has interrupted the nodes
                self._database.write(self._end_own)
            self._in_progress.clear()
        self.loom.close()

    def _end_own(self, connection: Connection) -> None:
        """Interrupt the nodes that this process generates, in a transaction."""
        row = self._lock_row(connection)
        if self._lease is not None:
            self._lease.renew(connection, is_finished=True)
        numbers = [each.number for each in self._in_progress.values()]
        mine = _nodes.c.writer == self._writer.id
        self._end(connection, row, _nodes.c.number.in_(numbers) & mine)

    # Changes of other processes

    @_exclusive
    def sync(self) -> Change:
        """Merge changes of other processes into the tree, and return them.

        Uncommitted changes of the tree stay.
        """
        others = MergedChanges([], [], [])
        self._end_orphans()
        self._database.read(lambda connection: self._sync(connection, others))
        return Change(self.rev, "sync", *others)

    def _sync(self, connection: Connection, others: MergedChanges) -> None:
        """Read and merge rows of other processes, in a transaction."""
        row = connection.execute(self._select_row).first()
        self._merge(connection, self._check_row(row), others)

    def _lock_row(self, connection: Connection) -> Any:
        """Lock and return the loom's row: no other process writes until the transaction ends."""
        row = connection.execute(self._select_row.with_for_update()).first()
        return self._check_row(row)

    def _check_row(self, row: Any) -> Any:
        """Return the loom's row. Raises: StoreError if the loom was removed."""
        if row is None or row.id != self.id:
            raise StoreError(
                f"the loom {self.name} is not in the database any more",
                hint="library.create(loom) saves it again; loom.save(path) writes a file",
            )
        self.name, self.is_removed = row.name, row.removed is not None
        self.title = LoomMetadata.from_json(row.head).title
        return row

    def _merge(self, connection: Connection, loom: Any, others: MergedChanges) -> None:
        """Merge rows that other processes have written since this one read the loom last."""
        rev: int = loom.rev
        if rev == self.rev:
            return
        theirs = LoomMetadata.from_json(loom.head).user_prompt
        # A prompt that was changed here stays; the commit writes it.
        if rev > self.rev and self.loom.user_prompt == self._prompt:
            self.loom.user_prompt = theirs
        self._prompt = theirs
        if rev < self.rev:  # an older copy of the database was restored: all nodes are new to it
            self.rev = -1
            self._snapshot.reset()
            self._in_progress.clear()
        where = [_nodes.c.loom == self._key, _nodes.c.writer.is_(None)]
        where.append(_nodes.c.rev > self.rev if self.rev >= 0 else ~_nodes.c.removed)
        rows = select_nodes(connection, self._snapshot.params, *where)
        growing = [each.node for each in self._in_progress.values()]
        taken = self._snapshot.merge(rows, growing)
        self.rev = rev
        others.added.extend(taken.added)
        others.changed.extend(taken.changed)
        others.removed.extend(taken.removed)

    # Undoing

    def undo(self, *, leave: Iterable[Heddle] = (), running: Collection[str] = ()) -> Change:
        """Undo the loom's last operation, of any process, with the rest of its group (`act`).

        Uncommitted changes are committed first, and are then the last operation.

        Args:
            leave: nodes to leave uncommitted; see `commit`.
            running: names of groups that may not be undone, because they are not finished.

        Raises: StoreError if there is nothing to undo. Conflict if a node that would be removed
        is being grown, or if the group is not finished.
        """
        before = self.commit("edit", leave=leave)
        return self._undo_or_redo("undo", DONE, _operations.c.key.desc(), running).after(before)

    def redo(self, *, leave: Iterable[Heddle] = ()) -> Change:
        """Redo the operation that `undo` has undone last, with the rest of its group.

        leave: nodes to leave uncommitted; see `commit`.
        Raises: StoreError if there is nothing to redo.
        """
        before = self.commit("edit", leave=leave)
        return self._undo_or_redo("redo", UNDONE, _operations.c.key.asc()).after(before)

    @_exclusive
    def restore_nodes(self, *, actor: str = "") -> Change:
        """Restore the nodes of the last removal that are still removed, as a new operation.

        Later operations stay. Raises: StoreError if no node is removed.
        """
        self._commit("edit", "", {})
        last = self.last_removal()
        if last is None:
            raise StoreError(f"no node of {self.name} is removed: there is nothing to restore")
        self._database.write(lambda connection: self._restore_nodes(connection, last.key, actor))
        return self.sync()._replace(kind="restore")

    def _restore_nodes(self, connection: Connection, key: int, actor: str) -> None:
        """Restore the nodes of the last removal, in a transaction."""
        row = self._lock_row(connection)
        data = connection.execute(sa.select(_operations.c.data).where(_operations.c.key == key))
        coming = still_removed(connection, self._key, data.scalar_one())
        if not coming:  # another process, or an earlier attempt, has restored them
            return
        rev = row.rev + 1
        set_removed(connection, self._key, coming, rev, removed=False)
        coming += restore_ancestors(connection, self._key, rev)
        drop_undone(connection, self._key)
        log_operation(connection, self._key, "restore", actor, Steps(coming, [], {}), rev)
        touch(connection, self._key, rev=rev, n_nodes=count_nodes(self._key))

    def last_removal(self) -> Operation | None:
        """Return the last removal with nodes that are still removed; None if there is none."""
        return self._database.read(lambda connection: last_removal(connection, self._key))

    def history(self, limit: int = 50) -> list[Operation]:
        """Return the loom's last operations, newest first. limit: maximum number of operations."""
        columns = [_operations.c[name] for name in Operation._fields]
        query = sa.select(*columns).where(_operations.c.loom == self._key)
        query = query.order_by(_operations.c.key.desc()).limit(limit)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [Operation(*row) for row in rows]

    def origin(self, node: Heddle) -> Operation | None:
        """Return the operation that added a node; None if the node is not committed yet.

        Cost: O(operations).
        """
        number = self._snapshot.numbers.get(node.id, -1)
        columns = [_operations.c[name] for name in Operation._fields]
        query = sa.select(*columns, _operations.c.data).where(
            _operations.c.loom == self._key, _operations.c.n_added > 0
        )
        query = query.order_by(_operations.c.key)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        for row in rows:
            if number in Steps.from_json(row.data).added:
                return Operation(*row[: len(Operation._fields)])
        return None

    @_exclusive
    def _undo_or_redo(
        self, kind: str, state: str, order: Any, running: Collection[str] = ()
    ) -> Change:
        """Undo or redo the next operation and its group.

        kind: "undo" or "redo". state: of operations to consider. order: SQL order, the next one
        first. running: names of groups that are not finished, and so raise Conflict.
        """
        # Read first: a retry after a lost answer must not undo the next group, too.
        keys, act = self._database.read(
            lambda connection: next_in_log(connection, self._key, state, order)
        )
        if not keys:
            raise StoreError(f"there is nothing to {kind} in the loom {self.name}")
        if act is not None and (act in running or self._is_running(act)):
            raise Conflict(
                "the last operation is still running, so it cannot be undone yet",
                rev=self.rev,
                hint="wait until it has finished, or cancel it",
            )

        def work(connection: Connection) -> None:
            for key in keys:
                apply(connection, self._lock_row(connection), key, state)

        self._database.write(work)
        return self.sync()._replace(kind=kind)

    def _is_running(self, act: str) -> bool:
        """Return True if the process that named this group (`new_act`) is still running."""
        process_id = process_of(act)
        if process_id == self._writer.id:
            return False
        return not self._database.read(
            lambda connection: find_dead(connection, {process_id}, self._database)
        )


def insert_nodes(stored: StoredLoom, connection: Connection) -> PendingCommit:
    """Write the nodes of a new loom, in the transaction that creates the loom's row.

    A label in a node's meta, which an import writes there, becomes its bookmark.
    Returns the written rows, for `accept_commit` after the transaction.
    """
    bookmarks: dict[str, str | None] = {
        node.id: label
        for node in stored.loom.walk()
        if isinstance(label := node.meta.get("bookmark"), str) and is_db_text(label)
    }
    pending = stored._write(connection, "create", "", bookmarks, MergedChanges([], [], []))
    assert pending is not None
    return pending


def accept_commit(stored: StoredLoom, pending: PendingCommit) -> None:
    """Mark the rows that `insert_nodes` wrote as saved, after their transaction has succeeded."""
    stored._accept(pending)
