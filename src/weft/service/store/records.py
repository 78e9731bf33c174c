"""Read nodes as plain records in pages, without opening the tree."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.validation import check_int
from ...errors import ConfigError
from .rows import checks_columns, db_text, score_of, text_of
from .tables import nodes, pieces

_CHUNK = 500
MAX_PAGE = 10_000  # maximum number of records in a page
# Columns for a record: all but token ids and entropies.
_COLUMNS = [
    nodes.c[name]
    for name in (
        "number id parent place text exact n_tokens logprobs params lineage finish_reason"
        " stop_string terminal score meta bookmark removed writer rev"
    ).split()
]


class NodeRecord(NamedTuple):
    """A node's values from its database row, without its tokens. The tree need not be open."""

    number: int
    id: str
    parent: int | None  # number of the parent; None for the root
    place: float  # orders siblings
    text: str
    n_tokens: int
    n_children: int
    mean_logprob: float | None  # of the sampled tokens; None if there are none
    mean_p: float | None  # mean probability of the sampled tokens
    params: str | None  # key of the sampling parameters; equal parameters have equal keys
    lineage: tuple[int, ...]
    finish_reason: str | None
    stop_string: str | None
    terminal: bool
    score: float | None
    meta: dict[str, Any]
    bookmark: str | None
    is_removed: bool
    is_growing: bool  # a process is generating the node
    rev: int  # the loom's revision that changed the node last


class PageOptions(TypedDict, total=False):
    """Keyword arguments that select the nodes of a page; see `StoredLoom.nodes`."""

    under: str | int | None
    depth: int | None
    since: int | None
    limit: int
    after: int | None


def page(connection: Connection, loom: int, **which: Unpack[PageOptions]) -> list[NodeRecord]:
    """Return nodes of a loom in the order of their numbers; see `StoredLoom.nodes`."""
    under, depth, since = which.get("under"), which.get("depth"), which.get("since")
    limit, after = which.get("limit", 100), which.get("after")
    check_int("limit", limit, 1, MAX_PAGE)
    conditions = [nodes.c.loom == loom]
    if since is None:
        conditions.append(~nodes.c.removed)
    else:
        conditions.append(nodes.c.rev > check_int("since", since))
    if after is not None:
        conditions.append(nodes.c.number > check_int("after", after))
    if depth is not None:
        check_int("depth", depth, 0)
    if under is not None or depth is not None:
        top = _number(connection, loom, 0 if under is None else under)
        conditions.append(nodes.c.number.in_(sa.select(_below(loom, top, depth).c.number)))
    query = sa.select(*_COLUMNS).where(*conditions).order_by(nodes.c.number).limit(limit)
    rows = connection.execute(query).all()
    growing = [row.number for row in rows if row.writer is not None]
    return _records(
        rows,
        _counts(connection, loom, [row.number for row in rows]),
        _pieces(connection, loom, growing),
    )


def _number(connection: Connection, loom: int, name: str | int) -> int:
    """Return the number of a node given by number or id. Raises: ConfigError."""
    text = db_text(str(name))
    is_number = text.isdecimal() and len(text) <= 9
    condition = nodes.c.number == int(text) if is_number else nodes.c.id == text
    number = connection.execute(
        sa.select(nodes.c.number).where(nodes.c.loom == loom, condition, ~nodes.c.removed)
    ).scalar()
    if number is None:
        raise ConfigError(
            f"there is no node {text!r:.80} in the loom", hint="weft tree shows the nodes"
        )
    return int(number)


def _below(loom: int, top: int, depth: int | None) -> sa.CTE:
    """Return an SQL subquery for the numbers of a node and its descendants.

    loom: key of the loom's row. top: number of the node.
    depth: maximum level below it; None means all levels.
    """
    at = sa.select(sa.literal(top).label("number"), sa.literal(0).label("level"))
    below = at.cte("below", recursive=True)
    more = sa.select(nodes.c.number, below.c.level + 1).where(
        nodes.c.loom == loom, nodes.c.parent == below.c.number, ~nodes.c.removed
    )
    if depth is not None:
        more = more.where(below.c.level < depth)
    return below.union_all(more)


def _counts(connection: Connection, loom: int, numbers: list[int]) -> dict[int, int]:
    """Return the number of children of each of these nodes, by node number."""
    counts: dict[int, int] = {}
    for at in range(0, len(numbers), _CHUNK):
        rows = connection.execute(
            sa.select(nodes.c.parent, sa.func.count())
            .where(
                nodes.c.loom == loom,
                nodes.c.parent.in_(numbers[at : at + _CHUNK]),
                ~nodes.c.removed,
            )
            .group_by(nodes.c.parent)
        )
        counts.update((parent, count) for parent, count in rows)
    return counts


def _pieces(connection: Connection, loom: int, numbers: list[int]) -> dict[int, list[Any]]:
    """Return the saved chunks of nodes in progress by node number, in the order of their tokens."""
    chunks: dict[int, list[Any]] = {}
    for at in range(0, len(numbers), _CHUNK):
        query = sa.select(pieces.c.number, pieces.c.text, pieces.c.n_tokens, pieces.c.logprobs)
        some = pieces.c.number.in_(numbers[at : at + _CHUNK])
        query = query.where(pieces.c.loom == loom, some).order_by(pieces.c.first)
        for row in connection.execute(query):
            chunks.setdefault(row.number, []).append(row)
    return chunks


@checks_columns
def _records(rows: Any, counts: dict[int, int], parts: dict[int, list[Any]]) -> list[NodeRecord]:
    """Convert rows of nodes to records."""
    records = []
    for row in rows:
        chunks = parts.get(row.number, [])
        mean_logprob, mean_p = _means(b"".join(part.logprobs for part in chunks) or row.logprobs)
        records.append(
            NodeRecord(
                row.number,
                row.id,
                row.parent,
                row.place,
                "".join(json.loads(part.text) for part in chunks) if chunks else text_of(row),
                sum(part.n_tokens for part in chunks) if chunks else row.n_tokens,
                counts.get(row.number, 0),
                mean_logprob,
                mean_p,
                row.params,
                tuple(json.loads(row.lineage)),
                row.finish_reason,
                None if row.stop_string is None else json.loads(row.stop_string),
                row.terminal,
                score_of(row.score),
                json.loads(row.meta),
                row.bookmark,
                row.removed,
                row.writer is not None,
                row.rev,
            )
        )
    return records


def _means(logprobs: bytes) -> tuple[float | None, float | None]:
    """Return the mean probability and the mean logprob of packed logprobs; None without any."""
    if not logprobs:
        return None, None
    values = np.frombuffer(logprobs, "<f8")
    return float(values.mean()), float(np.exp(values).mean())
