"""Log operations of a loom, and undo and redo them in its rows."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import Conflict
from .commit import count_nodes, restore_ancestors, set_removed, touch
from .log import DONE, DROPPED, FIRST, UNDONE, Operation, Steps
from .metadata import LoomMetadata
from .rows import Values, db_text
from .tables import nodes, operations
from .text_normalization import search_text, strip_template


def log_operation(
    connection: Connection,
    loom: int,
    kind: str,
    actor: str,
    steps: Steps,
    rev: int,
    *,
    is_first: bool = False,
    act: str | None = None,
    model: str | None = None,
) -> None:
    """Add an operation to a loom's log.

    Args:
        loom: key of the loom's row.
        kind, actor: the operation in one word, and who did it; both for display.
        steps: what it added, removed and changed.
        rev: the loom's revision after it.
        is_first: the operation is the creation of the loom, which cannot be undone.
        act: name of its group of commits; None without one.
        model: the model that generated the new nodes; None if none were generated.
    """
    connection.execute(
        sa.insert(operations).values(
            loom=loom,
            kind=kind,
            actor=actor,
            at=time.time(),
            rev=rev,
            state=FIRST if is_first else DONE,
            n_added=len(steps.added),
            n_removed=len(steps.removed),
            n_changed=len(steps.changed),
            data=steps.to_json(),
            act=act,
            model=None if model is None else db_text(model),
        )
    )


def drop_undone(connection: Connection, loom: int) -> None:
    """Mark undone operations as dropped: after a new operation they cannot be redone."""
    connection.execute(
        sa.update(operations)
        .where(operations.c.loom == loom, operations.c.state == UNDONE)
        .values(state=DROPPED)
    )


def next_in_log(
    connection: Connection, loom: int, state: str, order: Any
) -> tuple[list[int], str | None]:
    """Return the keys of the next operation to undo or redo and of its group, and the group's name.

    state: DONE to undo, UNDONE to redo. order: the SQL order that has the next operation first.
    Without such an operation the list is empty. The name is None for an operation without a group.
    """
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
    """Undo an operation, or redo it, if it is still in this state.

    Args:
        loom: the loom's locked row.
        key: key of the operation's row.
        state: DONE undoes the operation, UNDONE redoes it.

    Nodes that others have added below a node that this removes stay, with their ancestors.
    Raises: Conflict if a node that would be removed is being grown.
    """
    operation = connection.execute(sa.select(operations).where(operations.c.key == key)).one()
    if operation.state != state:  # another process, or an earlier attempt, has done it
        return
    steps, is_undo = Steps.from_json(operation.data), state == DONE
    removals, restorations = (
        (steps.added, steps.removed) if is_undo else (steps.removed, steps.added)
    )
    _check_not_growing(connection, loom.key, removals)
    rev = loom.rev + 1
    set_removed(connection, loom.key, removals, rev, removed=True)
    set_removed(connection, loom.key, restorations, rev, removed=False)
    head = LoomMetadata.from_json(loom.head)
    if steps.prompt is not None:
        head = head._replace(user_prompt=steps.prompt[0 if is_undo else 1])
    for number, (before, after) in steps.changed.items():
        columns: Values = dict(before if is_undo else after)
        if "text" in columns:
            prompt = "" if number else db_text(head.user_prompt)
            columns["words"] = search_text(strip_template(columns["text"], prompt))
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


def _check_not_growing(connection: Connection, loom: int, numbers: Collection[int]) -> None:
    """Raise Conflict if one of these nodes is being generated."""
    rows = connection.execute(
        sa.select(nodes.c.parent).where(
            nodes.c.loom == loom, nodes.c.writer.is_not(None), ~nodes.c.removed
        )
    )
    below = {row.parent for row in rows} & set(numbers)
    if below:
        raise Conflict(
            f"node {min(below)} is being grown, so the operation that added it cannot be undone",
            hint="wait until it has finished, or cancel it",
        )


def last_removal(connection: Connection, loom: int) -> Operation | None:
    """Return the last removal with nodes that are still removed; None if there is none."""
    columns = [operations.c[name] for name in Operation._fields]
    query = sa.select(*columns, operations.c.data).where(
        operations.c.loom == loom,
        operations.c.state == DONE,
        operations.c.n_removed > 0,
        operations.c.n_added == 0,
    )
    for *fields, data in connection.execute(query.order_by(operations.c.key.desc())):
        if still_removed(connection, loom, data):
            return Operation(*fields)
    return None


def still_removed(connection: Connection, loom: int, data: str) -> list[int]:
    """Return the numbers of nodes that an operation has removed and that nothing has restored.

    data: the steps of the operation, as JSON of the log.
    """
    query = sa.select(nodes.c.number).where(nodes.c.loom == loom, nodes.c.removed)
    removed = set(connection.execute(query).scalars())
    return [number for number in Steps.from_json(data).removed if number in removed]
