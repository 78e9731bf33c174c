"""Write one operation: insert, restore, update and remove rows of nodes."""

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

CHUNK = 500  # maximum number of values in one statement
# Columns that the log stores. `words` is left out: it is computed from the text.
GROUP_COLUMNS = [name for group in GROUPS.values() for name in group if name != "words"]


@dataclass(slots=True)
class PendingCommit:
    """The rows that a transaction has written.

    The snapshot and the loom take over these values after the transaction has succeeded.
    """

    rev: int  # the loom's new revision
    next_number: int
    prompt: str
    steps: Steps = field(default_factory=lambda: Steps([], [], {}))
    saved: dict[str, SavedNode] = field(default_factory=dict)
    added: list[Heddle] = field(default_factory=list)
    changed: list[Heddle] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    # Ids of nodes that are no longer in progress.
    ended: list[str] = field(default_factory=list)


def build_commit(
    connection: Connection,
    database: Database,
    snapshot: Snapshot,
    difference: Difference,
    loom: Any,
    bookmarks: dict[str, str | None],
) -> PendingCommit:
    """Write the changes of a tree to the rows of a locked loom.

    Args:
        difference: the changes.
        loom: the loom's locked row.
        bookmarks: new labels by node id, for nodes whose bookmark changes; None removes it.
    """
    pending = PendingCommit(loom.rev + 1, loom.next_number, snapshot.loom.user_prompt)
    writer = _CommitWriter(connection, database, snapshot, difference, loom.key, pending)
    writer.add(bookmarks)
    writer.change(bookmarks)
    pending.removed = list(difference.removed)
    pending.steps.removed.extend(snapshot.saved[each].number for each in difference.removed)
    set_removed(connection, loom.key, pending.steps.removed, pending.rev, removed=True)
    return pending


class _CommitWriter:
    """Writes the rows of one commit, and collects the steps for its log entry in `pending`."""

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
        self._pending = pending

    def add(self, bookmarks: dict[str, str | None]) -> None:
        """Insert rows of new nodes. Rows that exist already are updated, and restored if removed.

        bookmarks: labels by node id.
        """
        pending, existing = self._pending, self._existing_rows()
        numbers: dict[str, int] = {}
        for node in self._difference.added:
            number = existing.get(node.id)
            if number is None:
                number, pending.next_number = pending.next_number, pending.next_number + 1
            numbers[node.id] = number
        new, restored = [], []
        for node in self._difference.added:
            saved = self._saved_new(node, numbers, bookmarks.get(node.id))
            pending.saved[node.id] = saved
            pending.added.append(node)
            pending.steps.added.append(saved.number)
            values = {
                **self._values(saved, GROUPS),
                "removed": False,
                "writer": None,
                "rev": pending.rev,
            }
            if node.id in existing:
                restored.append((node.id, saved.number, values))
            else:
                new.append({"loom": self._key, "number": saved.number, "id": node.id, **values})
        self._keep_params(pending.saved.values())
        if new:
            self._connection.execute(sa.insert(nodes), new)
        self._restore_rows(restored)

    def _restore_rows(self, rows: list[tuple[str, int, Values]]) -> None:
        """Update rows of new nodes that exist already, and log their previous values for undo.

        rows: (node id, node number, new values of columns).
        """
        after = {node_id: values for node_id, _, values in rows}
        for row in self._rows(nodes.c.id, list(after)):
            if row.writer is None:
                self._log_change(row, after[row.id], GROUP_COLUMNS)
        self._update({"at": number, **_prefix_names(values)} for _, number, values in rows)

    def _log_change(self, row: Any, values: Values, names: Iterable[str]) -> None:
        """Add the columns of a row that change, with their previous values, to the log entry.

        values: the new values. names: the columns to compare.
        """
        before = row._mapping
        changed = [name for name in names if values[name] != before[name]]
        if changed:
            steps = self._pending.steps
            steps.changed[row.number] = (
                {name: before[name] for name in changed},
                {name: values[name] for name in changed},
            )

    def change(self, bookmarks: dict[str, str | None]) -> None:
        """Update the rows of changed nodes, and log their previous values.

        bookmarks: new labels by node id; None removes a bookmark.
        """
        pending, changed = self._pending, self._difference.changed
        after: dict[int, Values] = {}
        for node_id, groups in changed.items():
            saved = self._saved_changed(node_id, groups, bookmarks)
            pending.saved[node_id] = saved
            pending.changed.append(saved.node)
            after[saved.number] = self._values(saved, groups)
        self._keep_params(pending.saved[each] for each in changed)
        for row in self._rows(nodes.c.number, list(after)):
            values = after[row.number]
            self._log_change(row, values, [name for name in values if name != "words"])
        self._update(
            {"at": number, **_prefix_names({**values, "rev": pending.rev})}
            for number, values in after.items()
        )

    def _saved_new(self, node: Heddle, numbers: dict[str, int], bookmark: str | None) -> SavedNode:
        """Return a new node as a `SavedNode`, with its number and bookmark."""
        position = self._difference.positions[node.id]
        parent = None
        if position.parent is not None:
            parent = numbers.get(position.parent.id, self._snapshot.numbers.get(position.parent.id))
        return SavedNode(
            node,
            numbers[node.id],
            parent,
            position.place,
            Content.from_node(node).copy(),
            score_value(node.score),
            meta_json(node),
            bookmark,
        )

    def _saved_changed(
        self, node_id: str, groups: set[str], bookmarks: dict[str, str | None]
    ) -> SavedNode:
        """Return a changed node as a `SavedNode`, with new values of these groups of columns."""
        old = self._snapshot.saved[node_id]
        node, position = old.node, self._difference.positions.get(node_id)
        new = SavedNode(
            node,
            old.number,
            old.parent,
            old.place,
            Content.from_node(node).copy() if "content" in groups else old.content,
            score_value(node.score),
            meta_json(node),
            bookmarks[node_id] if "bookmark" in groups else old.bookmark,
        )
        if "place" in groups and position is not None and position.parent is not None:
            pending, numbers = self._pending.saved.get(position.parent.id), self._snapshot.numbers
            new.parent = pending.number if pending is not None else numbers[position.parent.id]
            new.place = position.place
        return new

    def _values(self, saved: SavedNode, groups: Iterable[str]) -> Values:
        """Return the columns of these groups for a node's row."""
        values: Values = {}
        params = self._snapshot.params
        for group in groups:
            if group == "content":
                prompt: str = getattr(saved.node, "user_prompt", "")  # only roots have one
                values.update(content_values(saved.content, saved.node.text, params, prompt))
            else:
                values.update({name: getattr(saved, name) for name in GROUPS[group]})
        return values

    def _existing_rows(self) -> dict[str, int]:
        """Return numbers of new nodes that have rows: generated nodes, and restored ones."""
        saved = self._snapshot.numbers
        ids = [node.id for node in self._difference.added]
        if self._pending.rev == 1:
            return {}
        numbers = {node_id: saved[node_id] for node_id in ids if node_id in saved}
        unknown = [node_id for node_id in ids if node_id not in saved]
        numbers.update((row.id, row.number) for row in self._rows(nodes.c.id, unknown))
        return numbers

    def _rows(self, column: sa.Column[Any], wanted: list[Any]) -> Iterable[Any]:
        """Yield the rows whose column has one of these values, in batches of parameters."""
        for at in range(0, len(wanted), CHUNK):
            yield from self._connection.execute(
                sa.select(nodes).where(
                    nodes.c.loom == self._key, column.in_(wanted[at : at + CHUNK])
                )
            )

    def _update(self, values: Iterable[Values]) -> None:
        """Update rows; rows with the same columns in one statement."""
        by_columns: dict[tuple[str, ...], list[Values]] = {}
        for row in values:
            by_columns.setdefault(tuple(row), []).append(row)
        for names, rows in by_columns.items():
            self._connection.execute(
                sa.update(nodes)
                .where(nodes.c.loom == self._key, nodes.c.number == sa.bindparam("at"))
                .values({name[4:]: sa.bindparam(name) for name in names if name != "at"}),
                rows,
            )

    def _keep_params(self, saved: Iterable[SavedNode]) -> None:
        """Insert rows of sampling parameters that the nodes use and that do not exist yet."""
        keys = {
            self._snapshot.params.key(each.content.params)
            for each in saved
            if each.content.params is not None
        }
        if keys:
            rows = [{"key": key, "data": data} for key, data in keys]
            statement = self._database.insert(sampling).on_conflict_do_nothing()
            self._connection.execute(statement, rows)


def _prefix_names(values: Values) -> Values:
    """Prefix the names of columns, as bind parameters of an UPDATE need names of their own."""
    # In an UPDATE, SQLAlchemy reserves bind parameters with the names of columns.
    return {f"new_{name}": value for name, value in values.items()}


def set_removed(
    connection: Connection, loom: int, numbers: Collection[int], rev: int, *, removed: bool
) -> None:
    """Mark nodes as removed, or with removed=False as not removed.

    loom: key of the loom's row. numbers: of the nodes. rev: the revision that their rows get.
    """
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
    """Restore removed nodes that have descendants in the loom; return their numbers.

    loom: key of the loom's row. rev: the revision that the restored rows get.
    """
    above, below = nodes.alias(), nodes.alias()
    removed_parents = sa.select(above.c.number).where(
        above.c.loom == loom,
        above.c.removed,
        sa.exists().where(below.c.loom == loom, below.c.parent == above.c.number, ~below.c.removed),
    )
    restored: list[int] = []
    while numbers := connection.execute(removed_parents).scalars().all():
        set_removed(connection, loom, numbers, rev, removed=False)
        restored += numbers
    return restored


def count_nodes(loom: int) -> sa.ScalarSelect[int]:
    """Return an SQL subquery for a loom's number of nodes.

    It excludes removed nodes and nodes in progress. loom: key of the loom's row.
    """
    conditions = (nodes.c.loom == loom, ~nodes.c.removed, nodes.c.writer.is_(None))
    return sa.select(sa.func.count()).select_from(nodes).where(*conditions).scalar_subquery()


def touch(connection: Connection, loom: int, **values: Any) -> None:
    """Write `values` to a loom's row and set its time of change, so that lists show it first.

    loom: key of the loom's row.
    """
    turn = sa.select(sa.func.coalesce(sa.func.max(looms.c.turn), 0) + 1).scalar_subquery()
    connection.execute(
        sa.update(looms).where(looms.c.key == loom).values(turn=turn, changed=time.time(), **values)
    )
