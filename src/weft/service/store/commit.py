"""One operation, written: rows put in, brought back, changed and marked as removed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...loom import Heddle
from .database import Database
from .log import Steps, runs
from .rows import GROUPS, Content, Values, content_values, meta_json, score_value
from .snapshot import Difference, SavedNode, Snapshot
from .tables import looms, nodes, sampling

CHUNK = 500  # values that one statement names
# What the log notes of a row; its words follow from its text.
GROUP_COLUMNS = [name for group in GROUPS.values() for name in group if name != "words"]


@dataclass(slots=True)
class PendingCommit:
    """What a transaction has written: it is taken over once that is kept.

    known: rows by id as they are then. ended: ids of nodes that grow no more.
    """

    rev: int
    next_number: int
    prompt: str
    steps: Steps = field(default_factory=lambda: Steps([], [], {}))
    saved: dict[str, SavedNode] = field(default_factory=dict)
    added: list[Heddle] = field(default_factory=list)
    changed: list[Heddle] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def build_commit(
    connection: Connection,
    database: Database,
    snapshot: Snapshot,
    difference: Difference,
    loom: Any,
    bookmarks: dict[str, str | None],
) -> PendingCommit:
    """Write what differs into the rows of a loom that is locked.

    loom: its row. bookmarks: labels by id, of nodes whose bookmark is among what differs.
    """
    pending = PendingCommit(loom.rev + 1, loom.next_number, snapshot.loom.user_prompt)
    writing = _Writing(connection, database, snapshot, difference, loom.key, pending)
    writing.add(bookmarks)
    writing.change(bookmarks)
    pending.removed = list(difference.removed)
    pending.steps.removed.extend(snapshot.saved[each].number for each in difference.removed)
    set_removed(connection, loom.key, pending.steps.removed, pending.rev, removed=True)
    return pending


class _Writing:
    """One operation on its way into the rows."""

    def __init__(
        self,
        connection: Connection,
        database: Database,
        snapshot: Snapshot,
        difference: Difference,
        key: int,
        pending: PendingCommit,
    ) -> None:
        self._connection = connection
        self._database = database
        self._snapshot = snapshot
        self._difference = difference
        self._key = key
        self._draft = pending

    def add(self, bookmarks: dict[str, str | None]) -> None:
        """Put in the rows of new nodes; those that have rows are brought back."""
        pending, there = self._draft, self._rows_there()
        numbers: dict[str, int] = {}
        for node in self._difference.added:
            number = there.get(node.id)
            if number is None:
                number, pending.next_number = pending.next_number, pending.next_number + 1
            numbers[node.id] = number
        new, again = [], []
        for node in self._difference.added:
            saved = self._known(node, numbers, bookmarks.get(node.id))
            pending.saved[node.id] = saved
            pending.added.append(node)
            pending.steps.added.append(saved.number)
            values = {
                **self._values(saved, GROUPS),
                "removed": False,
                "writer": None,
                "rev": pending.rev,
            }
            if node.id in there:
                again.append((node.id, saved.number, values))
            else:
                new.append({"loom": self._key, "number": saved.number, "id": node.id, **values})
        self._keep_params(pending.saved.values())
        if new:
            self._connection.execute(sa.insert(nodes), new)
        self._restore_rows(again)

    def _restore_rows(self, again: list[tuple[str, int, Values]]) -> None:
        """Bring rows back, and note for the log what they were: undo makes them that again."""
        after = {node_id: values for node_id, _, values in again}
        for row in self._rows(nodes.c.id, list(after)):
            if row.writer is None:
                self._log_change(row, after[row.id], GROUP_COLUMNS)
        self._update({"at": number, **_bound(values)} for _, number, values in again)

    def _log_change(self, row: Any, values: Values, names: Iterable[str]) -> None:
        """Note for the log how a row changes, if it does."""
        before = row._mapping
        changed = [name for name in names if values[name] != before[name]]
        if changed:
            steps = self._draft.steps
            steps.changed[row.number] = (
                {name: before[name] for name in changed},
                {name: values[name] for name in changed},
            )

    def change(self, bookmarks: dict[str, str | None]) -> None:
        """Change the rows of known nodes, and note for the log what they were."""
        pending, changed = self._draft, self._difference.changed
        after: dict[int, Values] = {}
        for node_id, groups in changed.items():
            saved = self._changed(node_id, groups, bookmarks)
            pending.saved[node_id] = saved
            pending.changed.append(saved.node)
            after[saved.number] = self._values(saved, groups)
        self._keep_params(pending.saved[each] for each in changed)
        for row in self._rows(nodes.c.number, list(after)):
            values = after[row.number]
            self._log_change(row, values, [name for name in values if name != "words"])
        self._update(
            {"at": number, **_bound({**values, "rev": pending.rev})}
            for number, values in after.items()
        )

    def _known(self, node: Heddle, numbers: dict[str, int], bookmark: str | None) -> SavedNode:
        position = self._difference.positions[node.id]
        parent = None
        if position.parent is not None:
            parent = numbers.get(position.parent.id, self._snapshot.numbers.get(position.parent.id))
        return SavedNode(
            node,
            numbers[node.id],
            parent,
            position.place,
            Content.of(node).kept(),
            score_value(node.score),
            meta_json(node),
            bookmark,
        )

    def _changed(
        self, node_id: str, groups: set[str], bookmarks: dict[str, str | None]
    ) -> SavedNode:
        old = self._snapshot.saved[node_id]
        node, position = old.node, self._difference.positions.get(node_id)
        new = SavedNode(
            node,
            old.number,
            old.parent,
            old.place,
            Content.of(node).kept() if "content" in groups else old.content,
            score_value(node.score),
            meta_json(node),
            bookmarks[node_id] if "bookmark" in groups else old.bookmark,
        )
        if "place" in groups and position is not None and position.parent is not None:
            pending, numbers = self._draft.saved.get(position.parent.id), self._snapshot.numbers
            new.parent = pending.number if pending is not None else numbers[position.parent.id]
            new.place = position.place
        return new

    def _values(self, saved: SavedNode, groups: Iterable[str]) -> Values:
        found: Values = {}
        params = self._snapshot.params
        for group in groups:
            if group == "content":
                prompt: str = getattr(saved.node, "user_prompt", "")  # of a root
                found.update(content_values(saved.content, saved.node.text, params, prompt))
            else:
                found.update({name: getattr(saved, name) for name in GROUPS[group]})
        return found

    def _rows_there(self) -> dict[str, int]:
        """Return numbers of new nodes that have rows: nodes that grow, and such as come back."""
        saved = self._snapshot.numbers
        ids = [node.id for node in self._difference.added]
        if self._draft.rev == 1:
            return {}
        found = {each: saved[each] for each in ids if each in saved}
        unsure = [each for each in ids if each not in saved]
        found.update((row.id, row.number) for row in self._rows(nodes.c.id, unsure))
        return found

    def _rows(self, column: sa.Column[Any], wanted: list[Any]) -> Iterable[Any]:
        for at in range(0, len(wanted), CHUNK):
            yield from self._connection.execute(
                sa.select(nodes).where(
                    nodes.c.loom == self._key, column.in_(wanted[at : at + CHUNK])
                )
            )

    def _update(self, values: Iterable[Values]) -> None:
        """Change rows; those that change alike in one statement."""
        alike: dict[tuple[str, ...], list[Values]] = {}
        for each in values:
            alike.setdefault(tuple(each), []).append(each)
        for names, rows in alike.items():
            self._connection.execute(
                sa.update(nodes)
                .where(nodes.c.loom == self._key, nodes.c.number == sa.bindparam("at"))
                .values({name[4:]: sa.bindparam(name) for name in names if name != "at"}),
                rows,
            )

    def _keep_params(self, saved: Iterable[SavedNode]) -> None:
        keys = {
            self._snapshot.params.key(each.content.params)
            for each in saved
            if each.content.params is not None
        }
        if keys:
            rows = [{"key": key, "data": data} for key, data in keys]
            statement = self._database.insert(sampling).on_conflict_do_nothing()
            self._connection.execute(statement, rows)


def _bound(values: Values) -> Values:
    # A name of its own for each: those of the columns are taken in an UPDATE.
    return {f"new_{name}": value for name, value in values.items()}


def set_removed(
    connection: Connection, loom: int, numbers: Collection[int], rev: int, *, removed: bool
) -> None:
    """Take nodes out of a loom, or put them back."""
    rows = [{"low": first, "high": last} for first, last in runs(numbers)]
    if rows:
        connection.execute(
            sa.update(nodes)
            .where(
                nodes.c.loom == loom,
                nodes.c.number.between(sa.bindparam("low"), sa.bindparam("high")),
            )
            .values(removed=removed, rev=rev),
            rows,
        )


def restore_ancestors(connection: Connection, loom: int, rev: int) -> list[int]:
    """Put back the nodes above what is in a loom: nothing stands below what is removed.

    Returns their numbers.
    """
    above, below = nodes.alias(), nodes.alias()
    lacking = sa.select(above.c.number).where(
        above.c.loom == loom,
        above.c.removed,
        sa.exists().where(below.c.loom == loom, below.c.parent == above.c.number, ~below.c.removed),
    )
    found: list[int] = []
    while numbers := connection.execute(lacking).scalars().all():
        set_removed(connection, loom, numbers, rev, removed=False)
        found += numbers
    return found


def count_nodes(loom: int) -> sa.ScalarSelect[int]:
    """Return the number of nodes of a loom that are there and do not grow, as SQL."""
    there = (nodes.c.loom == loom, ~nodes.c.removed, nodes.c.writer.is_(None))
    return sa.select(sa.func.count()).select_from(nodes).where(*there).scalar_subquery()


def touch(connection: Connection, loom: int, **values: Any) -> None:
    """Change a loom's row: it is the one that was changed last."""
    turn = sa.select(sa.func.coalesce(sa.func.max(looms.c.turn), 0) + 1).scalar_subquery()
    connection.execute(
        sa.update(looms).where(looms.c.key == loom).values(turn=turn, changed=time.time(), **values)
    )
