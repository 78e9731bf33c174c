"""Operations of a loom's log, taken back and done again in its rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import Conflict
from .commit import count_nodes, restore_ancestors, set_removed, touch
from .log import DONE, UNDONE, Operation, Steps
from .metadata import LoomMetadata
from .rows import Values, db_text
from .tables import nodes, operations
from .text_normalization import search_text, strip_template


def next_in_log(
    connection: Connection, loom: int, state: str, order: Any
) -> tuple[list[int], str | None]:
    """Return the operation that is next, and those after it that are parts of its act; and that."""
    query = sa.select(operations.c.key, operations.c.act).where(
        operations.c.loom == loom, operations.c.state == state
    )
    keys: list[int] = []
    first: str | None = None
    for key, act in connection.execute(query.order_by(order)):
        if keys and (act is None or act != first):
            break
        keys.append(key)
        first = act
    return keys, first


def apply(connection: Connection, loom: Any, key: int, state: str) -> None:
    """Take an operation back, or do it again, if it still is in this state.

    loom: its row, locked. What others have put below what goes stays, and the way to it.
    Raises: Conflict where something grows from a node that would go.
    """
    operation = connection.execute(sa.select(operations).where(operations.c.key == key)).one()
    if operation.state != state:  # done meanwhile: by another process, or before a lost answer
        return
    steps, is_undo = Steps.loaded(operation.data), state == DONE
    going, coming = (steps.added, steps.removed) if is_undo else (steps.removed, steps.added)
    _check_not_growing(connection, loom.key, going)
    rev = loom.rev + 1
    set_removed(connection, loom.key, going, rev, removed=True)
    set_removed(connection, loom.key, coming, rev, removed=False)
    head = LoomMetadata.loaded(loom.head)
    if steps.prompt is not None:
        head = head._replace(user_prompt=steps.prompt[0 if is_undo else 1])
    for number, (before, after) in steps.changed.items():
        columns: Values = dict(before if is_undo else after)
        if "text" in columns:
            asked = "" if number else db_text(head.user_prompt)
            columns["words"] = search_text(strip_template(columns["text"], asked))
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom.key, nodes.c.number == number)
            .values(**columns, rev=rev)
        )
    restore_ancestors(connection, loom.key, rev)
    connection.execute(
        sa.update(operations)
        .where(operations.c.key == key)
        .values(state=UNDONE if is_undo else DONE)
    )
    touch(connection, loom.key, rev=rev, n_nodes=count_nodes(loom.key), **head.columns())


def _check_not_growing(connection: Connection, loom: int, going: Collection[int]) -> None:
    rows = connection.execute(
        sa.select(nodes.c.parent).where(
            nodes.c.loom == loom, nodes.c.writer.is_not(None), ~nodes.c.removed
        )
    )
    below = {row.parent for row in rows} & set(going)
    if below:
        raise Conflict(
            f"node {min(below)} is being grown just now, so what made it cannot be undone",
            hint="wait until it has grown, or cancel that",
        )


def last_removal(connection: Connection, loom: int) -> Operation | None:
    """Return the last removal of which something is still out; None for none."""
    columns = [operations.c[name] for name in Operation._fields]
    query = sa.select(*columns, operations.c.data).where(
        operations.c.loom == loom,
        operations.c.state == DONE,
        operations.c.n_removed > 0,
        operations.c.n_added == 0,
    )
    for *told, data in connection.execute(query.order_by(operations.c.key.desc())):
        if still_removed(connection, loom, data):
            return Operation(*told)
    return None


def still_removed(connection: Connection, loom: int, data: str) -> list[int]:
    """Return the numbers of what an operation removed, and nothing has brought back."""
    query = sa.select(nodes.c.number).where(nodes.c.loom == loom, nodes.c.removed)
    out = set(connection.execute(query).scalars())
    return [number for number in Steps.loaded(data).removed if number in out]
