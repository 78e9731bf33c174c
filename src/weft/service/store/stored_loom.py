"""A live loom bound to its rows: what any face changed in it is written as one operation.

Whoever writes takes in first what others have written. What was grown is never lost: a removal
takes along what its author could see, and where somebody has grown further below meanwhile, the
way to that stays, or comes back. Of two changes of one thing the later one to be written holds; the
log has both.
"""

from __future__ import annotations

import threading
import time
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
from .log import DONE, DROPPED, FIRST, UNDONE, Operation, Steps
from .metadata import LoomMetadata
from .records import NodeRecord, PageOptions, page
from .rows import Values, db_text, is_db_text, select_nodes
from .snapshot import MergedChanges, Snapshot
from .stream_writer import persist_stream
from .undo import apply, last_removal, next_in_log, still_removed

_nodes, _operations = tables.nodes, tables.operations
P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(
    work: Callable[Concatenate[StoredLoom, P], R],
) -> Callable[Concatenate[StoredLoom, P], R]:
    """Let a method run alone, and Ctrl-C wait for its end: rows and tree go together."""

    @wraps(work)
    def run(kept: StoredLoom, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with deferred_interrupt(), kept._lock:
            return work(kept, *args, **kwargs)

    return run


class StoredLoom:
    """A loom that is kept: `loom` is the live tree, and the same in the database after `commit`.

    Not for two threads at once; any number of processes may hold the same loom.
    """

    def __init__(self, database: Database, writer: ProcessHeartbeat, row: Any, loom: Loom) -> None:
        """Bind a tree to the rows of a loom; see `Library.create` and `Library.open`."""
        self.loom = loom
        self.id: str = row.id
        self.name: str = row.name
        self.rev = -1
        self.is_removed = False  # by somebody, as far as was looked: it can be brought back
        self._database = database
        self._writer = writer
        self._key: int = row.key
        self._select_row = sa.select(tables.looms).where(tables.looms.c.key == self._key)
        self._snapshot = Snapshot(loom)
        self._in_progress: dict[str, InProgressNode] = {}
        self._prompt = loom.user_prompt  # as the row has it
        lease_s = writer.lease_s
        self._lease = None if lease_s is None else LeaseHolder(database, self.id, lease_s)
        self._lock = threading.RLock()  # `follow` appends from a thread of its own

    # Names of nodes

    def number(self, node: Heddle) -> int:
        """Return a node's number: unique in its loom, given once, never again; 0 is the root.

        Raises: TreeError for a node that is not kept yet.
        """
        found = self._snapshot.numbers.get(node.id)
        if found is None:
            raise TreeError(f"the node {node.id} is not kept yet: commit gives it its number")
        return found

    def numbers(self) -> Mapping[str, int]:
        """Return number by id, of all nodes that this tree has had: a view, which goes on."""
        return MappingProxyType(self._snapshot.numbers)

    def node(self, given: str | int) -> Heddle:
        """Return the node with this number or id. Raises: ConfigError for none such."""
        text = str(given)
        if text.isdecimal() and len(text) <= 9:
            return self._by_number(int(text))
        saved = self._snapshot.saved.get(text)
        if saved is not None:
            return saved.node
        try:
            return self.loom.find(text)
        except TreeError:
            raise ConfigError(
                f"NODE is {given!r}; allowed is a number, 0 (the prompt) to "
                f"{max(self._snapshot.ids, default=0)}, or an id",
                hint="weft tree shows them",
            ) from None

    def _by_number(self, number: int) -> Heddle:
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
                hint="weft tree draws it again",
            )
        raise ConfigError(
            f"node {number} is not in the loom any more", hint="weft tree draws what is there"
        )

    def nodes(self, **which: Unpack[PageOptions]) -> list[NodeRecord]:
        """Return nodes as plain records from the rows, in the order of their numbers.

        Those that grow just now are among them. Keywords:
            under: a number or id: this node and what is below it.
            depth: so many levels below `under` (or the root); 0 is that node alone.
            since: only what was changed after this revision; what was removed since then, too.
            limit: at most so many (100). after: those with higher numbers: the next page.
        Raises: ConfigError for a node that is not there. Cost: O(limit); with `under`, O(nodes
        below), without their tokens.
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
        """Write whatever differs from the rows as one operation; what others wrote comes in first.

        kind: what was done, in a word, for people: "grow", "edit", "remove". act: what several
        commits are parts of, as the rounds of a search; those that follow each other are undone,
        and done again, together. model: that grew what is new; None: the loom's. leave: nodes that
        `append` has numbered, and which are to be another commit's: they stay as they are.
        unchanged: nodes that nobody else may have changed since what others wrote came in last.
        When it returns, all of it is durable; where nothing differs, nothing is written.
        Raises: StoreError, and nothing of it is kept; LeaseLost where another server has taken over
        the loom: this tree is of no use any more. ConfigError for a meta that is not JSON. Conflict
        where somebody has changed one of `unchanged`: nothing was written, and nothing came in.
        Cost: O(nodes) comparisons in memory; rows are written and read only for what has changed.
        """
        return self._commit(kind, actor, {}, act, model, leave, unchanged)

    def new_act(self) -> str:
        """Return a name for several commits to come (`act=`), of this process.

        Nobody else undoes them until its library is closed; what it dies over goes with them.
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
        """Mark a node, or take its mark away (None). An operation of its own.

        unchanged: as `commit` has it. Raises: as that does.
        """
        if label is not None and not (isinstance(label, str) and is_db_text(label)):
            raise ConfigError(f"a bookmark is {label!r:.80}; allowed is a text that can be shown")
        if node.id not in self._snapshot.saved:
            self.commit("edit")
            self.number(node)
        return self._commit("bookmark", actor, {node.id: label}, unchanged=unchanged)

    def bookmarks(self) -> dict[int, str]:
        """Return the bookmarks: labels by the numbers of their nodes."""
        saved = self._snapshot.saved.values()
        return {each.number: each.bookmark for each in saved if each.bookmark is not None}

    def has(self, node: Heddle) -> bool:
        """Whether a node is kept whole: what has grown is with its commit."""
        return node.id in self._snapshot.saved

    def is_durable(self, node: Heddle) -> bool:
        """Whether a node that has ended is kept as it ended, should this process die now."""
        growing = self._in_progress.get(node.id)
        return self.has(node) or (growing is not None and growing.is_finish_saved)

    @_exclusive
    def is_changed(self) -> bool:
        """Whether the live tree differs from what is kept, but for what grows or has grown.

        Cost: O(nodes).
        """
        try:
            difference = self._snapshot.difference()
        except ConfigError:  # by a meta that cannot be kept
            return True
        difference.leave(self._in_progress.keys())
        return bool(difference) or self.loom.user_prompt != self._prompt

    @_exclusive
    def revert(self) -> None:
        """Make the live tree what is kept again: what was changed and not committed goes.

        What has grown and could not be committed stays, and is the next commit's.
        Raises: TreeError for a loom without its model, which is to be opened anew.
        """
        if self.loom.lm is None:
            raise TreeError("a loom without its model cannot be put back: open it anew")
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
        others, left = MergedChanges([], [], []), {each.id for each in leave}
        same = {each.id for each in unchanged}
        pending = self._database.write(
            lambda connection: self._write(
                connection, kind, actor, bookmarks, others, act, model, left, same
            )
        )
        seen = others if any(others) else None
        if pending is None:
            return Change(self.rev, kind, [], [], [], seen)
        self._accept(pending)
        return Change(self.rev, kind, pending.added, pending.changed, pending.removed, seen)

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
        difference.leave(left)
        for node_id, label in bookmarks.items():
            saved = self._snapshot.saved.get(node_id)
            if saved is None and node_id in difference.positions:
                continue  # it is new, and comes with its mark
            if saved is None:
                raise Conflict(
                    f"node {self._snapshot.numbers.get(node_id, node_id)} has been removed by"
                    " somebody else just now, so it cannot be marked",
                    rev=self.rev,
                    code="node_removed",
                    hint="undo brings it back",
                )
            if saved.bookmark != label:
                difference.changed.setdefault(node_id, set()).add("bookmark")
        failed = [
            each
            for each in self._in_progress.values()
            if each.is_finished and each.node.id not in difference.positions
        ]
        head = LoomMetadata.of(self.loom)
        if not (difference or failed or head.dumped() != row.head):
            return None
        is_asked_anew = head.user_prompt != self._prompt
        pending = build_commit(
            connection, self._database, self._snapshot, difference, row, bookmarks
        )
        finish_nodes(connection, self._key, pending, failed, self._in_progress)
        if difference or is_asked_anew:
            self._drop_undone(connection)
            prompt = (self._prompt, head.user_prompt) if is_asked_anew else None
            steps, is_first = pending.steps._replace(prompt=prompt), row.rev == 0
            is_grown = any(node.params is not None for node in pending.added)
            more = {"act": act, "model": (model or head.load) if is_grown else None}
            self._log_operation(
                connection, kind, actor, steps, pending.rev, is_first=is_first, **more
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

    def _drop_undone(self, connection: Connection) -> None:
        """Something new is done: what was undone cannot be done again."""
        connection.execute(
            sa.update(_operations)
            .where(_operations.c.loom == self._key, _operations.c.state == UNDONE)
            .values(state=DROPPED)
        )

    def _log_operation(
        self,
        connection: Connection,
        kind: str,
        actor: str,
        steps: Steps,
        rev: int,
        *,
        is_first: bool = False,
        act: str | None = None,
        model: str | None = None,
    ) -> None:
        connection.execute(
            sa.insert(_operations).values(
                loom=self._key,
                kind=kind,
                actor=actor,
                at=time.time(),
                rev=rev,
                state=FIRST if is_first else DONE,
                n_added=len(steps.added),
                n_removed=len(steps.removed),
                n_changed=len(steps.changed),
                data=steps.dumped(),
                act=act,
                model=None if model is None else db_text(model),
            )
        )

    def _check_unchanged(self, connection: Connection, row: Any, ids: Collection[str]) -> None:
        """Raise Conflict where one of these nodes was changed by somebody else since."""
        if not ids or row.rev == self.rev:
            return
        number = connection.execute(
            sa.select(_nodes.c.number).where(
                _nodes.c.loom == self._key, _nodes.c.id.in_(ids), _nodes.c.rev > self.rev
            )
        ).scalar()
        if number is not None:
            raise Conflict(
                f"node {number} was changed by somebody else just now",
                rev=row.rev,
                hint="read it anew, and change that",
            )

    def _accept(self, pending: PendingCommit) -> None:
        snapshot = self._snapshot
        for node_id in pending.removed:
            snapshot.remove(node_id, growing=bool(self._in_progress))
        for node_id, saved in pending.saved.items():
            snapshot.saved[node_id] = saved
            snapshot.set_number(node_id, saved.number)
        for node_id in pending.ended:
            self._in_progress.pop(node_id, None)
        if not self._in_progress:
            snapshot.gone.clear()
        self.rev, self._prompt = pending.rev, pending.prompt

    # InProgressNode

    @_exclusive
    def append(self, nodes: Iterable[Heddle]) -> None:
        """Keep the new tokens of nodes that grow, and how they ended: durable when this returns.

        nodes: of a `stream` (`Delta.node`), which need not be in the tree yet. Each has its number
        from now on. No operation: their commit follows, once they have ended. Where this process
        dies before, those that have not end as "interrupted" when the loom is opened next.
        Cost: what is new in them.
        """
        wanted = {node.id: node for node in nodes if node.id not in self._snapshot.saved}
        new = [node for node in in_call_order(wanted.values()) if node.id not in self._in_progress]
        for node in new:
            parent = node.parent
            if parent is None or parent.id not in self._snapshot.saved:
                self.commit("edit")
                break
        begun, kept, ended, rev = self._database.write(
            lambda connection: self._append(connection, wanted, new)
        )
        self._in_progress.update(begun)
        for growing in begun.values():
            self._snapshot.set_number(growing.node.id, growing.number)
        for growing, piece in kept:
            growing.mark_saved(piece)
        for growing in ended:
            growing.is_finish_saved = True
        self.rev = rev if self.rev == rev - 1 else self.rev

    def follow(
        self, deltas: Iterable[Delta], *, kind: str = "grow", actor: str = ""
    ) -> Generator[Delta, None, None]:
        """Yield the deltas of a `stream` and keep them: durable within a second, whole at the end.

            for delta in kept.follow(node.stream(n=4, max_tokens=200)):
                print(kept.number(delta.node), delta.text)

        However it ends, what was made is committed. The tree is only to be read meanwhile.
        """
        return persist_stream(self, deltas, kind, actor)

    def _append(
        self, connection: Connection, wanted: Mapping[str, Heddle], new: list[Heddle]
    ) -> tuple[
        dict[str, InProgressNode], list[tuple[InProgressNode, Values]], list[InProgressNode], int
    ]:
        row = self._lock_row(connection)
        writer = self._writer.register(connection)
        if new or self._in_progress:
            row = self._acquire_lease(connection, row, writer)
        begun, next_number = add_in_progress(
            connection, self._database, self._snapshot, row, new, writer
        )
        all_of = {**self._in_progress, **begun}
        those = [
            all_of[each] for each in wanted if each in all_of and not all_of[each].is_finish_saved
        ]
        ended = newly_finished(those)
        kept = append_chunks(connection, self._database, row, those)
        save_finish(connection, self._snapshot.params, row, ended)
        if not (begun or kept or ended):
            return begun, kept, ended, row.rev
        touch(connection, self._key, rev=row.rev + 1, next_number=next_number)
        return begun, kept, ended, row.rev + 1

    def _acquire_lease(self, connection: Connection, row: Any, writer: str) -> Any:
        """Take or keep the lease, where looms are grown with one; return the loom's row."""
        if self._lease is None:
            return row
        if self._in_progress:
            self._lease.renew(connection, is_finished=False)
            return row
        former = self._lease.acquire(
            connection, writer, lambda mark: bool(find_dead(connection, {mark}, self._database))
        )
        if former:  # who was too slow, or is dead on another machine
            self._end(connection, row, _nodes.c.writer == former)
            row = self._lock_row(connection)
        return row

    def _end_orphans(self) -> None:
        """End what processes that are dead were growing here."""
        own = self._writer.id
        if not self._database.read(
            lambda connection: find_orphaned(connection, self._database, self._key, own)
        ):
            return

        def work(connection: Connection) -> None:
            row = self._lock_row(connection)
            gone = find_orphaned(connection, self._database, self._key, own)
            if gone:
                self._end(connection, row, _nodes.c.writer.in_(gone))

        self._database.write(work)

    def _end(self, connection: Connection, row: Any, where: sa.ColumnElement[bool]) -> None:
        act = act_of_processes(connection, self._key, where)
        steps = interrupt_nodes(connection, row, where)
        if steps.added:
            self._log_operation(connection, "interrupted", "", steps, row.rev + 1, act=act)
        touch(
            connection,
            self._key,
            rev=row.rev + 1,
            n_nodes=tables.looms.c.n_nodes + len(steps.added),
        )

    def close(self) -> None:
        """End what still grows here, as "interrupted", and close the tree; idempotent.

        What is not committed stays in memory only.
        """
        if self._in_progress:
            with suppress(LeaseLost):  # then whoever took it over has ended them
                self._database.write(self._end_own)
            self._in_progress.clear()
        self.loom.close()

    def _end_own(self, connection: Connection) -> None:
        row = self._lock_row(connection)
        if self._lease is not None:
            self._lease.renew(connection, is_finished=True)
        numbers = [each.number for each in self._in_progress.values()]
        mine = _nodes.c.writer == self._writer.id
        self._end(connection, row, _nodes.c.number.in_(numbers) & mine)

    # What others wrote

    @_exclusive
    def sync(self) -> Change:
        """Take in what others wrote; what was changed here and not committed stays."""
        others = MergedChanges([], [], [])
        self._end_orphans()
        self._database.read(lambda connection: self._sync(connection, others))
        return Change(self.rev, "sync", *others)

    def _sync(self, connection: Connection, others: MergedChanges) -> None:
        row = connection.execute(self._select_row).first()
        self._merge(connection, self._check_row(row), others)

    def _lock_row(self, connection: Connection) -> Any:
        """Return the loom's row; nobody else writes to this loom until the transaction ends."""
        row = connection.execute(self._select_row.with_for_update()).first()
        return self._check_row(row)

    def _check_row(self, row: Any) -> Any:
        if row is None or row.id != self.id:
            raise StoreError(
                f"the loom {self.name} is not in the database any more",
                hint="library.create(kept.loom) keeps it anew; loom.save(path) writes a file",
            )
        self.name, self.is_removed = row.name, row.removed is not None
        return row

    def _merge(self, connection: Connection, loom: Any, others: MergedChanges) -> None:
        rev: int = loom.rev
        if rev == self.rev:
            return
        theirs = LoomMetadata.loaded(loom.head).user_prompt
        # Or it was asked anew here, which is later to be written.
        if rev > self.rev and self.loom.user_prompt == self._prompt:
            self.loom.user_prompt = theirs
        self._prompt = theirs
        if rev < self.rev:  # an older copy of the database was put back: what is here is new to it
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
        """Take back the loom's last operation, whoever did it, with the others of its act.

        What is not committed is the last. leave: but for these nodes, as `commit` has it.
        running: acts that are not over yet.

        Raises: StoreError where there is none; Conflict where something grows just now from a node
        that would go, and for an act that is not over.
        """
        before = self.commit("edit", leave=leave)
        return self._undo_or_redo("undo", DONE, _operations.c.key.desc(), running).after(before)

    def redo(self, *, leave: Iterable[Heddle] = ()) -> Change:
        """Do again what `undo` took back last. Raises: StoreError where there is none."""
        before = self.commit("edit", leave=leave)
        return self._undo_or_redo("redo", UNDONE, _operations.c.key.asc()).after(before)

    @_exclusive
    def restore_nodes(self, *, actor: str = "") -> Change:
        """Put back what the last removal took and is still out, whatever was done since.

        An operation of its own, as adding it would be: it changes nothing else, and undo takes it
        back. Raises: StoreError where no node is removed.
        """
        self._commit("edit", "", {})
        last = self.last_removal()
        if last is None:
            raise StoreError(f"no node of {self.name} is removed: nothing is to be brought back")
        self._database.write(lambda connection: self._restore_nodes(connection, last.key, actor))
        return self.sync()._replace(kind="restore")

    def _restore_nodes(self, connection: Connection, key: int, actor: str) -> None:
        row = self._lock_row(connection)
        data = connection.execute(sa.select(_operations.c.data).where(_operations.c.key == key))
        coming = still_removed(connection, self._key, data.scalar_one())
        if not coming:  # done meanwhile: by another process, or before a lost answer
            return
        rev = row.rev + 1
        set_removed(connection, self._key, coming, rev, removed=False)
        coming += restore_ancestors(connection, self._key, rev)
        self._drop_undone(connection)
        self._log_operation(connection, "restore", actor, Steps(coming, [], {}), rev)
        touch(connection, self._key, rev=rev, n_nodes=count_nodes(self._key))

    def last_removal(self) -> Operation | None:
        """Return the last removal of which something is still out; None for none."""
        return self._database.read(lambda connection: last_removal(connection, self._key))

    def history(self, limit: int = 50) -> list[Operation]:
        """Return the loom's operations, the last one first."""
        columns = [_operations.c[name] for name in Operation._fields]
        query = sa.select(*columns).where(_operations.c.loom == self._key)
        query = query.order_by(_operations.c.key.desc()).limit(limit)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [Operation(*row) for row in rows]

    def origin(self, node: Heddle) -> Operation | None:
        """Return the operation that brought a node; None while it grows. Cost: O(operations)."""
        number = self._snapshot.numbers.get(node.id, -1)
        columns = [_operations.c[name] for name in Operation._fields]
        query = sa.select(*columns, _operations.c.data).where(
            _operations.c.loom == self._key, _operations.c.n_added > 0
        )
        query = query.order_by(_operations.c.key)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        for row in rows:
            if number in Steps.loaded(row.data).added:
                return Operation(*row[: len(Operation._fields)])
        return None

    @_exclusive
    def _undo_or_redo(
        self, kind: str, state: str, order: Any, running: Collection[str] = ()
    ) -> Change:
        # Before it is written: where the answer to that is lost, the next act is not turned, too.
        keys, act = self._database.read(
            lambda connection: next_in_log(connection, self._key, state, order)
        )
        if not keys:
            raise StoreError(f"there is nothing to {kind} in the loom {self.name}")
        if act is not None and (act in running or self._is_running(act)):
            raise Conflict(
                "what was done last is still going on, so it cannot be undone yet",
                rev=self.rev,
                hint="wait until it has ended, or cancel it",
            )

        def work(connection: Connection) -> None:
            for key in keys:
                apply(connection, self._lock_row(connection), key, state)

        self._database.write(work)
        return self.sync()._replace(kind=kind)

    def _is_running(self, act: str) -> bool:
        """Whether another process is about an act that it has named (`new_act`)."""
        mark = process_of(act)
        if mark == self._writer.id:
            return False
        return not self._database.read(
            lambda connection: find_dead(connection, {mark}, self._database)
        )


def insert_nodes(kept: StoredLoom, connection: Connection) -> PendingCommit:
    """Write a new loom's nodes, in the transaction that makes its row; see `accept_commit`.

    A label that an import has put into a node's meta is its bookmark from now on.
    """
    marks: dict[str, str | None] = {
        node.id: label
        for node in kept.loom.walk()
        if isinstance(label := node.meta.get("bookmark"), str) and is_db_text(label)
    }
    pending = kept._write(connection, "create", "", marks, MergedChanges([], [], []))
    assert pending is not None
    return pending


def accept_commit(kept: StoredLoom, pending: PendingCommit) -> None:
    """Take over what `insert_nodes` wrote, when that is kept."""
    kept._accept(pending)
