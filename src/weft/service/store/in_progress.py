"""Nodes that are being generated: their new tokens are saved in chunks until the commit.

Saving a chunk costs O(new tokens). If the process exits, the next process that opens the loom joins
the chunks, and the node becomes "interrupted" unless it was finished.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...loom import Heddle
from ...loom.node import child_list
from .commit import CHUNK, PendingCommit, set_removed
from .database import Database
from .heartbeats import find_dead, process_of
from .log import DONE, Steps
from .rows import (
    Content,
    Params,
    Values,
    checks_columns,
    content_values,
    db_text,
    meta_json,
    pack_floats,
    pack_ids,
    raw_bytes,
    unpack_ids,
)
from .snapshot import Snapshot
from .tables import nodes, operations, pieces, sampling
from .text_normalization import search_text

if TYPE_CHECKING:
    from ..._core.tokens.text import TextStream

_FLOAT_COLUMNS = ("logprobs", "entropies")
_END = ("finish_reason", "stop_string", "terminal")


@dataclass(slots=True)
class InProgressNode:
    """A node that is being generated, and the number of its tokens that are saved."""

    node: Heddle
    number: int
    text: TextStream | None  # decodes saved tokens; None for a loom without a model
    n_tokens: int = 0  # saved tokens
    is_finish_saved: bool = False  # the finish reason is saved, too

    @property
    def is_finished(self) -> bool:
        """True if the node has finished: it is in the tree, or it failed."""
        return self.node.finish_reason is not None

    @property
    def is_in_tree(self) -> bool:
        """True if the node has finished and is in the tree."""
        parent = self.node.parent
        if not self.is_finished or parent is None:
            return False
        return any(each is self.node for each in child_list(parent))

    def next_chunk(self) -> Values | None:
        """Return the tokens that are not saved yet, as a database row; None if there are none."""
        first, node = self.n_tokens, self.node
        # Another thread may be appending, logprobs and entropies after their tokens.
        lengths = [len(values) for values in (node.logprobs, node.entropies) if values]
        last = min([len(tokens := node.tokens), *lengths])
        new = tokens[first:last]
        if not new:
            return None
        stream = None if self.text is None else self.text.clone()
        text = "" if stream is None else "".join(map(stream.push, new))
        return {
            "number": self.number,
            "first": first,
            "n_tokens": len(new),
            "text": json.dumps(text),
            "tokens": pack_ids(new),
            # Empty if the engine returns none.
            "logprobs": pack_floats(node.logprobs[first:last]),
            "entropies": pack_floats(node.entropies[first:last]),
        }

    def mark_saved(self, chunk: Values) -> None:
        """Count the tokens of a chunk as saved, after its transaction has succeeded."""
        for token in unpack_ids(chunk["tokens"], chunk["n_tokens"]):
            if self.text is not None:
                self.text.push(token)
        self.n_tokens = chunk["first"] + chunk["n_tokens"]


def add_in_progress(
    connection: Connection,
    database: Database,
    snapshot: Snapshot,
    loom: Any,
    wanted: Iterable[Heddle],
    writer: str,
) -> tuple[dict[str, InProgressNode], int]:
    """Create rows for nodes whose generation starts. A node that has a row keeps its number.

    Args:
        loom: the loom's locked row.
        wanted: the nodes, in the order of their numbers. Their parents must have rows.
        writer: id of the process that generates the nodes.

    Returns: the nodes by id, and the next unused number.
    """
    wanted = list(wanted)
    numbers = _existing_numbers(connection, loom.key, [node.id for node in wanted])
    new = [node for node in wanted if node.id not in numbers]
    parents = {node.id: _parent(snapshot, node) for node in new}
    places = _last_places(connection, loom.key, set(parents.values()))
    rows, params = [], {}
    for number, node in enumerate(new, loom.next_number):
        parent = parents[node.id]
        places[parent] = place = places.get(parent, -1.0) + 1.0
        if node.params is not None:
            key, data = snapshot.params.key(node.params)
            params[key] = {"key": key, "data": data}
        numbers[node.id] = number
        rows.append(
            {
                **content_values(_empty(node), "", snapshot.params),
                "loom": loom.key,
                "number": number,
                "id": node.id,
                "parent": parent,
                "place": place,
                "score": None,
                "meta": meta_json(node),
                "bookmark": None,
                "removed": False,
                "writer": writer,
                "rev": loom.rev + 1,
            }
        )
    if params:
        statement = database.insert(sampling).on_conflict_do_nothing()
        connection.execute(statement, list(params.values()))
    if rows:
        connection.execute(sa.insert(nodes), rows)
    in_progress = {
        node.id: InProgressNode(node, numbers[node.id], _stream_of(node)) for node in wanted
    }
    return in_progress, loom.next_number + len(new)


def _existing_numbers(connection: Connection, loom: int, ids: list[str]) -> dict[str, int]:
    """Return the numbers of nodes that have rows already, by node id.

    loom: key of the loom's row. ids: node ids.
    """
    numbers: dict[str, int] = {}
    for at in range(0, len(ids), CHUNK):
        in_chunk = nodes.c.id.in_(ids[at : at + CHUNK])
        query = sa.select(nodes.c.id, nodes.c.number).where(nodes.c.loom == loom, in_chunk)
        numbers.update((row.id, row.number) for row in connection.execute(query))
    return numbers


def _parent(snapshot: Snapshot, node: Heddle) -> int | None:
    """Return the number of a node's parent; None for the root."""
    return None if node.parent is None else snapshot.numbers[node.parent.id]


def _last_places(
    connection: Connection, loom: int, parents: Collection[int | None]
) -> dict[int | None, float]:
    """Return the place of the last child of each parent, by the parent's number."""
    places: dict[int | None, float] = {}
    numbers = [number for number in parents if number is not None]
    for at in range(0, len(numbers), CHUNK):
        query = (
            sa.select(nodes.c.parent, sa.func.max(nodes.c.place).label("last"))
            .where(nodes.c.loom == loom, nodes.c.parent.in_(numbers[at : at + CHUNK]))
            .group_by(nodes.c.parent)
        )
        places.update((row.parent, row.last) for row in connection.execute(query))
    return places


def _stream_of(node: Heddle) -> TextStream | None:
    """Return a text stream that decodes the node's tokens; None without a tokenizer."""
    return None if node.lm is None else node.lm.text.stream()


def _empty(node: Heddle) -> Content:
    """Return the content of a node before its first token."""
    empty = Content.from_node(node)._replace(tokens=[], logprobs=[], entropies=[], legal_logmass=[])
    return empty._replace(finish_reason=None, stop_string=None, terminal=False)


def append_chunks(
    connection: Connection, database: Database, loom: Any, growing: Iterable[InProgressNode]
) -> list[tuple[InProgressNode, Values]]:
    """Save the unsaved tokens of nodes as chunks.

    loom: the loom's locked row. Returns the nodes that had new tokens, each with its chunk, to be
    passed to `mark_saved` after the transaction.
    """
    new = [(each, chunk) for each in growing if (chunk := each.next_chunk()) is not None]
    if new:
        statement = database.insert(pieces).on_conflict_do_nothing()
        connection.execute(statement, [{"loom": loom.key, **chunk} for _, chunk in new])
        set_removed(
            connection, loom.key, [each.number for each, _ in new], loom.rev + 1, removed=False
        )
    return new


def newly_finished(growing: Iterable[InProgressNode]) -> list[InProgressNode]:
    """Return finished nodes whose finish is not saved yet. Call it before `next_chunk`."""
    # In this order: another thread may add the last tokens and the finish in between.
    return [each for each in growing if not each.is_finish_saved and each.is_in_tree]


def save_finish(
    connection: Connection, params: Params, loom: Any, finished: Collection[InProgressNode]
) -> None:
    """Write the finish reasons of nodes to their rows, in case their commit never happens.

    params: the loom's cache of sampling parameters. loom: the loom's locked row.
    """
    for node in finished:
        values = content_values(Content.from_node(node.node), "", params)
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom.key, nodes.c.number == node.number)
            .values(**{name: values[name] for name in _END}, rev=loom.rev + 1)
        )


def finish_nodes(
    connection: Connection,
    loom: int,
    pending: PendingCommit,
    failed: Collection[InProgressNode],
    growing: Mapping[str, InProgressNode],
) -> None:
    """Delete the chunks of committed nodes, and mark the rows of failed nodes as removed.

    Sets `pending.ended` to the ids of both.

    Args:
        loom: key of the loom's row.
        failed: nodes that have finished without being added to the tree.
        growing: all nodes in progress, by id.
    """
    pending.ended = [node_id for node_id in pending.saved if node_id in growing]
    pending.ended += [node.node.id for node in failed]
    _delete_pieces(connection, loom, [growing[node_id].number for node_id in pending.ended])
    for node in failed:
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom, nodes.c.number == node.number)
            .values(removed=True, writer=None, rev=pending.rev)
        )


def find_orphaned(connection: Connection, database: Database, loom: int, own: str) -> set[str]:
    """Return the ids of processes that have exited while they generated nodes of a loom.

    loom: key of the loom's row. own: id of this process, which is left out.
    """
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, nodes.c.writer.is_not(None))
    marks = set(connection.execute(growing.distinct()).scalars()) - {own}
    return find_dead(connection, marks, database) if marks else set()


def count_in_progress(connection: Connection) -> Counter[int]:
    """Return the number of nodes in progress by loom key, without nodes that are still empty.

    Cost: O(nodes in progress). With GROUP BY, SQLite would read all nodes.
    """
    has_chunk = sa.exists().where(pieces.c.loom == nodes.c.loom, pieces.c.number == nodes.c.number)
    has_content = sa.or_(has_chunk, nodes.c.finish_reason.is_not(None))
    query = sa.select(nodes.c.loom).where(
        nodes.c.writer.is_not(None), ~nodes.c.removed, has_content
    )
    return Counter(connection.execute(query).scalars())


def act_of_processes(
    connection: Connection, loom: int, where: sa.ColumnElement[bool]
) -> str | None:
    """Return the group (`act`) of a loom's last operation, if the process of these nodes named it.

    The nodes then belong to this group, too. None if another process named it, or without a group.
    where: SQL condition that selects the rows of the nodes.
    """
    last = sa.select(operations.c.act).where(operations.c.loom == loom, operations.c.state == DONE)
    act = connection.execute(last.order_by(operations.c.key.desc()).limit(1)).scalar()
    if act is None:
        return None
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, where).distinct()
    return act if process_of(act) in connection.execute(growing).scalars() else None


def interrupt_nodes(connection: Connection, loom: Any, where: sa.ColumnElement[bool]) -> Steps:
    """Finish nodes in progress whose process has stopped.

    The saved chunks of a node are joined in its row. A node without a saved finish reason gets
    "interrupted". A node without tokens and without a finish reason is removed. Removed ancestors
    of the other nodes are restored.

    Args:
        loom: the loom's locked row. The nodes get the revision after it.
        where: SQL condition that selects the rows of the nodes.

    Returns: the numbers of the finished nodes and of restored ancestors, as `added`, for the log.
    """
    steps = Steps([], [], {})
    rows = connection.execute(sa.select(nodes).where(nodes.c.loom == loom.key, where)).all()
    for row in rows:
        values = _assemble(connection, row)
        has_content = row.finish_reason is not None or values["n_tokens"] > 0
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.key == row.key)
            .values(**values, writer=None, removed=not has_content, rev=loom.rev + 1)
        )
        if has_content:
            steps.added.append(row.number)
            _restore_ancestors(connection, loom, row.parent, steps)
    _delete_pieces(connection, loom.key, [row.number for row in rows])
    return steps


@checks_columns
def _assemble(connection: Connection, row: Any) -> Values:
    """Join the chunks of a node to the columns of its row."""
    parts = connection.execute(
        sa.select(pieces)
        .where(pieces.c.loom == row.loom, pieces.c.number == row.number)
        .order_by(pieces.c.first)
    ).all()
    ids = [token for part in parts for token in unpack_ids(part.tokens, part.n_tokens)]
    text = "".join(json.loads(part.text) for part in parts)
    floats = {name: b"".join(getattr(part, name) for part in parts) for name in _FLOAT_COLUMNS}
    return {
        "text": db_text(text),
        "exact": raw_bytes(text),
        "words": search_text(text),
        "n_tokens": len(ids),
        "tokens": pack_ids(ids),
        # For all tokens, or for none.
        **{name: data if len(data) == 8 * len(ids) else b"" for name, data in floats.items()},
        "finish_reason": row.finish_reason or "interrupted",
    }


def _restore_ancestors(connection: Connection, loom: Any, number: int | None, steps: Steps) -> None:
    """Restore the removed ancestors of a node, and add their numbers to `steps.added`.

    number: the number of the node's parent; None for the root.
    """
    while number is not None:
        row = connection.execute(
            sa.select(nodes).where(nodes.c.loom == loom.key, nodes.c.number == number)
        ).one()
        if not row.removed:
            return
        set_removed(connection, loom.key, [number], loom.rev + 1, removed=False)
        steps.added.append(number)
        number = row.parent


def _delete_pieces(connection: Connection, loom: int, numbers: Iterable[int]) -> None:
    """Delete the chunks of nodes."""
    rows = [{"at": number} for number in numbers]
    if rows:
        statement = sa.delete(pieces).where(
            pieces.c.loom == loom, pieces.c.number == sa.bindparam("at")
        )
        connection.execute(statement, rows)
