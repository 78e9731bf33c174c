"""Nodes that grow: their tokens come as pieces, each durable, until their commit or their end.

A piece costs what is new in it. Where the process that grows dies, the pieces are put together by
the next one that opens the loom: the node ends as "interrupted", unless it had ended.
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
    """A node that grows, and how much of it is kept."""

    node: Heddle
    number: int
    text: TextStream | None  # None: of a loom of texts
    n_tokens: int = 0
    is_finish_saved: bool = False  # how it ended is kept, too

    @property
    def is_finished(self) -> bool:
        """Whether it has ended: it is in the tree then, or it failed."""
        return self.node.finish_reason is not None

    @property
    def is_in_tree(self) -> bool:
        """Whether it has ended, and is there to stay."""
        parent = self.node.parent
        if not self.is_finished or parent is None:
            return False
        return any(each is self.node for each in child_list(parent))

    def next_chunk(self) -> Values | None:
        """Return what is new in it, as a row; None for nothing."""
        first, node = self.n_tokens, self.node
        # Another thread may be adding: figures come after their tokens.
        told = [len(each) for each in (node.logprobs, node.entropies) if each]
        last = min([len(tokens := node.tokens), *told])
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
            # Where the engine tells none there are none.
            "logprobs": pack_floats(node.logprobs[first:last]),
            "entropies": pack_floats(node.entropies[first:last]),
        }

    def mark_saved(self, piece: Values) -> None:
        """Note that a piece is kept."""
        for token in unpack_ids(piece["tokens"], piece["n_tokens"]):
            if self.text is not None:
                self.text.push(token)
        self.n_tokens = piece["first"] + piece["n_tokens"]


def add_in_progress(
    connection: Connection,
    database: Database,
    snapshot: Snapshot,
    loom: Any,
    wanted: Iterable[Heddle],
    writer: str,
) -> tuple[dict[str, InProgressNode], int]:
    """Make rows for nodes that begin to grow; return them by id, and the next free number.

    loom: its row, locked. Their parents have rows.
    """
    wanted = list(wanted)
    numbers = _numbers_there(connection, loom.key, [node.id for node in wanted])
    new = [node for node in wanted if node.id not in numbers]
    above = {node.id: _parent(snapshot, node) for node in new}
    places = _last_places(connection, loom.key, set(above.values()))
    rows, params = [], {}
    for number, node in enumerate(new, loom.next_number):
        parent = above[node.id]
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
                "meta": "{}",
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
    made = {node.id: InProgressNode(node, numbers[node.id], _stream_of(node)) for node in wanted}
    return made, loom.next_number + len(new)


def _numbers_there(connection: Connection, loom: int, ids: list[str]) -> dict[str, int]:
    """Return the numbers of nodes that have rows, by id."""
    found: dict[str, int] = {}
    for at in range(0, len(ids), CHUNK):
        of_some = nodes.c.id.in_(ids[at : at + CHUNK])
        query = sa.select(nodes.c.id, nodes.c.number).where(nodes.c.loom == loom, of_some)
        found.update((row.id, row.number) for row in connection.execute(query))
    return found


def _parent(snapshot: Snapshot, node: Heddle) -> int | None:
    return None if node.parent is None else snapshot.numbers[node.parent.id]


def _last_places(
    connection: Connection, loom: int, parents: Collection[int | None]
) -> dict[int | None, float]:
    """Return the places of the last children, by the number of their parent."""
    found: dict[int | None, float] = {}
    named = [number for number in parents if number is not None]
    for at in range(0, len(named), CHUNK):
        query = (
            sa.select(nodes.c.parent, sa.func.max(nodes.c.place).label("last"))
            .where(nodes.c.loom == loom, nodes.c.parent.in_(named[at : at + CHUNK]))
            .group_by(nodes.c.parent)
        )
        found.update((row.parent, row.last) for row in connection.execute(query))
    return found


def _stream_of(node: Heddle) -> TextStream | None:
    return None if node.lm is None else node.lm.text.stream()


def _empty(node: Heddle) -> Content:
    empty = Content.of(node)._replace(tokens=[], logprobs=[], entropies=[], legal_logmass=[])
    return empty._replace(finish_reason=None, stop_string=None, terminal=False)


def append_chunks(
    connection: Connection, database: Database, loom: Any, growing: Iterable[InProgressNode]
) -> list[tuple[InProgressNode, Values]]:
    """Write what is new in nodes that grow; return it."""
    new = [(each, piece) for each in growing if (piece := each.next_chunk()) is not None]
    if new:
        statement = database.insert(pieces).on_conflict_do_nothing()
        connection.execute(statement, [{"loom": loom.key, **piece} for _, piece in new])
        set_removed(
            connection, loom.key, [each.number for each, _ in new], loom.rev + 1, removed=False
        )
    return new


def newly_finished(growing: Iterable[InProgressNode]) -> list[InProgressNode]:
    """Return those whose end is to be kept; their pieces, if made after this, are whole."""
    # Another thread may be ending them.
    return [each for each in growing if not each.is_finish_saved and each.is_in_tree]


def save_finish(
    connection: Connection, params: Params, loom: Any, ended: Collection[InProgressNode]
) -> None:
    """Write how nodes ended: where their commit never comes, they are what they are."""
    for each in ended:
        values = content_values(Content.of(each.node), "", params)
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom.key, nodes.c.number == each.number)
            .values(**{name: values[name] for name in _END}, rev=loom.rev + 1)
        )


def finish_nodes(
    connection: Connection,
    loom: int,
    pending: PendingCommit,
    failed: Collection[InProgressNode],
    growing: Mapping[str, InProgressNode],
) -> None:
    """End the nodes that are whole in their rows now, and those that came to nothing."""
    pending.ended = [each for each in pending.saved if each in growing]
    pending.ended += [each.node.id for each in failed]
    _delete_pieces(connection, loom, [growing[each].number for each in pending.ended])
    for each in failed:
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom, nodes.c.number == each.number)
            .values(removed=True, writer=None, rev=pending.rev)
        )


def find_orphaned(connection: Connection, database: Database, loom: int, own: str) -> set[str]:
    """Return the processes that have died while they grew nodes of a loom."""
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, nodes.c.writer.is_not(None))
    marks = set(connection.execute(growing.distinct()).scalars()) - {own}
    return find_dead(connection, marks, database) if marks else set()


def count_in_progress(connection: Connection) -> Counter[int]:
    """Return how many nodes grow in which looms, by their keys: that have a token, or have ended.

    Cost: O(nodes that grow). Without GROUP BY, for which SQLite would read all nodes.
    """
    has_piece = sa.exists().where(pieces.c.loom == nodes.c.loom, pieces.c.number == nodes.c.number)
    begun = sa.or_(has_piece, nodes.c.finish_reason.is_not(None))
    query = sa.select(nodes.c.loom).where(nodes.c.writer.is_not(None), ~nodes.c.removed, begun)
    return Counter(connection.execute(query).scalars())


def act_of_processes(
    connection: Connection, loom: int, where: sa.ColumnElement[bool]
) -> str | None:
    """Return the act that a loom's last operation is a part of, if who grows these nodes named it.

    What has grown since is a part of it, too. None: there is no such act.
    """
    last = sa.select(operations.c.act).where(operations.c.loom == loom, operations.c.state == DONE)
    act = connection.execute(last.order_by(operations.c.key.desc()).limit(1)).scalar()
    if act is None:
        return None
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, where).distinct()
    return act if process_of(act) in connection.execute(growing).scalars() else None


def interrupt_nodes(connection: Connection, loom: Any, where: sa.ColumnElement[bool]) -> Steps:
    """End nodes whose process grows them no more; return what that adds to the loom.

    loom: its row, locked; the rows get its next revision. Those that had ended stay as they ended;
    of the others a node without a token is none.
    """
    steps = Steps([], [], {})
    rows = connection.execute(sa.select(nodes).where(nodes.c.loom == loom.key, where)).all()
    for row in rows:
        values = _assemble(connection, row)
        is_there = row.finish_reason is not None or values["n_tokens"] > 0
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.key == row.key)
            .values(**values, writer=None, removed=not is_there, rev=loom.rev + 1)
        )
        if is_there:
            steps.added.append(row.number)
            _restore_ancestors(connection, loom, row.parent, steps)
    _delete_pieces(connection, loom.key, [row.number for row in rows])
    return steps


@checks_columns
def _assemble(connection: Connection, row: Any) -> Values:
    parts = connection.execute(
        sa.select(pieces)
        .where(pieces.c.loom == row.loom, pieces.c.number == row.number)
        .order_by(pieces.c.first)
    ).all()
    ids = [token for part in parts for token in unpack_ids(part.tokens, part.n_tokens)]
    text = "".join(json.loads(part.text) for part in parts)
    figures = {name: b"".join(getattr(part, name) for part in parts) for name in _FLOAT_COLUMNS}
    return {
        "text": db_text(text),
        "exact": raw_bytes(text),
        "words": search_text(text),
        "n_tokens": len(ids),
        "tokens": pack_ids(ids),
        # Of all tokens, or of none.
        **{name: data if len(data) == 8 * len(ids) else b"" for name, data in figures.items()},
        "finish_reason": row.finish_reason or "interrupted",
    }


def _restore_ancestors(connection: Connection, loom: Any, number: int | None, steps: Steps) -> None:
    """Let the way to a node be in the loom again, where it was removed meanwhile."""
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
    rows = [{"at": number} for number in numbers]
    if rows:
        statement = sa.delete(pieces).where(
            pieces.c.loom == loom, pieces.c.number == sa.bindparam("at")
        )
        connection.execute(statement, rows)
