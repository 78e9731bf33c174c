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
from .database import Database
from .log import DONE, Steps
from .rows import (
    Content,
    Params,
    Values,
    content_values,
    exact,
    of_rows,
    packed_figures,
    packed_ids,
    plain,
    unpacked_ids,
)
from .snapshot import Snapshot
from .tables import nodes, operations, pieces, sampling
from .words import searchable
from .writers import dead, writer_of
from .writing import CHUNK, Draft, mark

if TYPE_CHECKING:
    from ..._core.tokens.text import TextStream

_FIGURES = ("logprobs", "entropies")
_END = ("finish_reason", "stop_string", "terminal")


@dataclass(slots=True)
class Growing:
    """A node that grows, and how much of it is kept."""

    node: Heddle
    number: int
    text: TextStream | None  # None: of a loom of texts
    n_tokens: int = 0
    has_end: bool = False  # how it ended is kept, too

    @property
    def is_over(self) -> bool:
        """Whether it has ended: it is in the tree then, or it failed."""
        return self.node.finish_reason is not None

    @property
    def is_in_tree(self) -> bool:
        """Whether it has ended, and is there to stay."""
        parent = self.node.parent
        if not self.is_over or parent is None:
            return False
        return any(each is self.node for each in child_list(parent))

    def piece(self) -> Values | None:
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
            "tokens": packed_ids(new),
            # Where the engine tells none there are none.
            "logprobs": packed_figures(node.logprobs[first:last]),
            "entropies": packed_figures(node.entropies[first:last]),
        }

    def take(self, piece: Values) -> None:
        """Note that a piece is kept."""
        for token in unpacked_ids(piece["tokens"], piece["n_tokens"]):
            if self.text is not None:
                self.text.push(token)
        self.n_tokens = piece["first"] + piece["n_tokens"]


def begin_growing(
    connection: Connection,
    database: Database,
    snapshot: Snapshot,
    loom: Any,
    wanted: Iterable[Heddle],
    writer: str,
) -> tuple[dict[str, Growing], int]:
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
    made = {node.id: Growing(node, numbers[node.id], _stream_of(node)) for node in wanted}
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


def add_pieces(
    connection: Connection, database: Database, loom: Any, growing: Iterable[Growing]
) -> list[tuple[Growing, Values]]:
    """Write what is new in nodes that grow; return it."""
    new = [(each, piece) for each in growing if (piece := each.piece()) is not None]
    if new:
        statement = database.insert(pieces).on_conflict_do_nothing()
        connection.execute(statement, [{"loom": loom.key, **piece} for _, piece in new])
        mark(connection, loom.key, [each.number for each, _ in new], loom.rev + 1, removed=False)
    return new


def ended_now(growing: Iterable[Growing]) -> list[Growing]:
    """Return those whose end is to be kept; their pieces, if made after this, are whole."""
    # Another thread may be ending them.
    return [each for each in growing if not each.has_end and each.is_in_tree]


def add_ends(connection: Connection, params: Params, loom: Any, ended: Collection[Growing]) -> None:
    """Write how nodes ended: where their commit never comes, they are what they are."""
    for each in ended:
        values = content_values(Content.of(each.node), "", params)
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom.key, nodes.c.number == each.number)
            .values(**{name: values[name] for name in _END}, rev=loom.rev + 1)
        )


def end_growing(
    connection: Connection,
    loom: int,
    draft: Draft,
    failed: Collection[Growing],
    growing: Mapping[str, Growing],
) -> None:
    """End the nodes that are whole in their rows now, and those that came to nothing."""
    draft.ended = [each for each in draft.known if each in growing]
    draft.ended += [each.node.id for each in failed]
    _delete_pieces(connection, loom, [growing[each].number for each in draft.ended])
    for each in failed:
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.loom == loom, nodes.c.number == each.number)
            .values(removed=True, writer=None, rev=draft.rev)
        )


def orphans(connection: Connection, database: Database, loom: int, own: str) -> set[str]:
    """Return the processes that have died while they grew nodes of a loom."""
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, nodes.c.writer.is_not(None))
    marks = set(connection.execute(growing.distinct()).scalars()) - {own}
    return dead(connection, marks, database) if marks else set()


def growing_nodes(connection: Connection) -> Counter[int]:
    """Return how many nodes grow in which looms, by their keys: that have a token, or have ended.

    Cost: O(nodes that grow). Without GROUP BY, for which SQLite would read all nodes.
    """
    has_piece = sa.exists().where(pieces.c.loom == nodes.c.loom, pieces.c.number == nodes.c.number)
    begun = sa.or_(has_piece, nodes.c.finish_reason.is_not(None))
    query = sa.select(nodes.c.loom).where(nodes.c.writer.is_not(None), ~nodes.c.removed, begun)
    return Counter(connection.execute(query).scalars())


def act_of_writers(connection: Connection, loom: int, where: sa.ColumnElement[bool]) -> str | None:
    """Return the act that a loom's last operation is a part of, if who grows these nodes named it.

    What has grown since is a part of it, too. None: there is no such act.
    """
    last = sa.select(operations.c.act).where(operations.c.loom == loom, operations.c.state == DONE)
    act = connection.execute(last.order_by(operations.c.key.desc()).limit(1)).scalar()
    if act is None:
        return None
    growing = sa.select(nodes.c.writer).where(nodes.c.loom == loom, where).distinct()
    return act if writer_of(act) in connection.execute(growing).scalars() else None


def end_interrupted(connection: Connection, loom: Any, where: sa.ColumnElement[bool]) -> Steps:
    """End nodes whose process grows them no more; return what that adds to the loom.

    loom: its row, locked; the rows get its next revision. Those that had ended stay as they ended;
    of the others a node without a token is none.
    """
    steps = Steps([], [], {})
    rows = connection.execute(sa.select(nodes).where(nodes.c.loom == loom.key, where)).all()
    for row in rows:
        values = _whole(connection, row)
        is_there = row.finish_reason is not None or values["n_tokens"] > 0
        connection.execute(
            sa.update(nodes)
            .where(nodes.c.key == row.key)
            .values(**values, writer=None, removed=not is_there, rev=loom.rev + 1)
        )
        if is_there:
            steps.added.append(row.number)
            _bring_back(connection, loom, row.parent, steps)
    _delete_pieces(connection, loom.key, [row.number for row in rows])
    return steps


@of_rows
def _whole(connection: Connection, row: Any) -> Values:
    parts = connection.execute(
        sa.select(pieces)
        .where(pieces.c.loom == row.loom, pieces.c.number == row.number)
        .order_by(pieces.c.first)
    ).all()
    ids = [token for part in parts for token in unpacked_ids(part.tokens, part.n_tokens)]
    text = "".join(json.loads(part.text) for part in parts)
    figures = {name: b"".join(getattr(part, name) for part in parts) for name in _FIGURES}
    return {
        "text": plain(text),
        "exact": exact(text),
        "words": searchable(text),
        "n_tokens": len(ids),
        "tokens": packed_ids(ids),
        # Of all tokens, or of none.
        **{name: data if len(data) == 8 * len(ids) else b"" for name, data in figures.items()},
        "finish_reason": row.finish_reason or "interrupted",
    }


def _bring_back(connection: Connection, loom: Any, number: int | None, steps: Steps) -> None:
    """Let the way to a node be in the loom again, where it was removed meanwhile."""
    while number is not None:
        row = connection.execute(
            sa.select(nodes).where(nodes.c.loom == loom.key, nodes.c.number == number)
        ).one()
        if not row.removed:
            return
        mark(connection, loom.key, [number], loom.rev + 1, removed=False)
        steps.added.append(number)
        number = row.parent


def _delete_pieces(connection: Connection, loom: int, numbers: Iterable[int]) -> None:
    rows = [{"at": number} for number in numbers]
    if rows:
        statement = sa.delete(pieces).where(
            pieces.c.loom == loom, pieces.c.number == sa.bindparam("at")
        )
        connection.execute(statement, rows)
