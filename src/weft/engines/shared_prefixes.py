"""The KV that queries of one step share, grouped into few attention calls. Integers only.

An attention call per span of KV costs time for each span, however short. A tree search steps dozens
of nodes of a dozen tokens, most with few queries. Spans that follow each other and have the same
queries are therefore merged, and short ones are copied into a padded batch with one call.

Engines with padded KV share this module. Each holds the tensors of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from .padded_pool import F, PaddedPool

# A span up to this many slots and queries joins a bundle, if there are SEVERAL of its kind.
SHORT = 64
FEW = 16
SEVERAL = 3
# Spans one below the other, with the same queries, that are no longer than this are moved together:
# a product more costs as much as some hundred slots, and what is moved once mostly stays.
JOINED = 1024
MOST_MOVES = 64
# As long as this they are copied instead, where that puts several into a bundle.
COPIED = 256


class QuerySpan(NamedTuple, Generic[F]):
    """The packed queries start..stop below one span. first: absolute position of its first slot.

    grows: whether a row of the step writes to it: it stays where it is.
    """

    fragment: F
    length: int
    first: int
    start: int
    stop: int
    grows: bool = False


class SharedPrefix(NamedTuple, Generic[F]):
    """Spans one below the other, and the packed queries start..stop below all of them.

    length: slots of them all. first: absolute position of the first slot.
    """

    spans: tuple[tuple[F, int], ...]
    length: int
    first: int
    start: int
    stop: int

    @property
    def is_short(self) -> bool:
        """Whether it joins a bundle, where there are several."""
        return self.length <= (SHORT if len(self.spans) == 1 else COPIED)

    @property
    def size(self) -> int:
        """Those of one size waste little where they are filled up to the longest."""
        return max(self.length, SHORT).bit_length()


def shared_prefixes_of(
    reaches: Sequence[QuerySpan[F]], memory: PaddedPool[F, Any]
) -> list[SharedPrefix[F]]:
    """Put spans together that follow each other and have the same queries.

    A search that goes on from the best of each round has many of them; on its own, each would cost
    a product a layer. Those that lie one behind the other already cost nothing; others are only put
    together up to JOINED, so that a path that grows is not moved again and again, and while none of
    them was moved MOST_MOVES times: paths that part below it would take it to and fro.
    """
    growing = {id(reach.fragment) for reach in reaches if reach.grows}

    def goes_on(last: SharedPrefix[F], piece: SharedPrefix[F]) -> bool:
        ends = id(last.spans[-1][0]), id(piece.spans[-1][0])
        return _follows(last, piece) and growing.isdisjoint(ends)

    pieces: list[SharedPrefix[F]] = []
    for fragment, length, first, start, stop, _ in reaches:
        piece = SharedPrefix(((fragment, length),), length, first, start, stop)
        last = pieces[-1] if pieces else None
        if last and goes_on(last, piece) and memory.is_next(last.spans[-1][0], fragment):
            pieces[-1] = _both(last, piece)
        else:
            pieces.append(piece)
    found: list[SharedPrefix[F]] = []
    may_move = False  # what was found last
    for piece in pieces:
        last, could_move = found[-1] if found else None, may_move
        may_move = all(kv.n_moves < MOST_MOVES for kv, _ in piece.spans)
        is_free = could_move and may_move
        if last and is_free and max(last.length, piece.length) <= JOINED and goes_on(last, piece):
            found[-1] = _both(last, piece)
        else:
            found.append(piece)
    return found


def _follows(last: SharedPrefix[F], piece: SharedPrefix[F]) -> bool:
    fragment, length = last.spans[-1]
    is_below = last.first + last.length == piece.first and fragment.length == length
    return is_below and (last.start, last.stop) == (piece.start, piece.stop)


def _both(last: SharedPrefix[F], piece: SharedPrefix[F]) -> SharedPrefix[F]:
    spans, length = (*last.spans, *piece.spans), last.length + piece.length
    return SharedPrefix(spans, length, last.first, last.start, last.stop)


class PrefixGroups(NamedTuple, Generic[F]):
    """Shared prefixes, grouped by attention call.

    Args:
        singles: prefixes with a call of their own.
        batches: short prefixes of similar length with one call per list. No query belongs to two
            prefixes of a batch.
    """

    singles: list[SharedPrefix[F]]
    batches: list[list[SharedPrefix[F]]]


def group_prefixes(reaches: Sequence[QuerySpan[F]], memory: PaddedPool[F, Any]) -> PrefixGroups[F]:
    """Merge spans and put short ones with few queries into batches."""
    singles: list[SharedPrefix[F]] = []
    by_size: dict[tuple[int, int], list[SharedPrefix[F]]] = {}
    depth: dict[int, int] = {}  # short prefixes above, by query
    for prefix in shared_prefixes_of(reaches, memory):
        queries = range(prefix.start, prefix.stop)
        if not prefix.is_short or len(queries) > FEW:
            singles.append(prefix)
            continue
        level = max(depth.get(query, 0) for query in queries)
        depth.update(dict.fromkeys(queries, level + 1))
        by_size.setdefault((level, prefix.size), []).append(prefix)
    batches = [batch for batch in by_size.values() if len(batch) >= SEVERAL]
    singles += [prefix for batch in by_size.values() if len(batch) < SEVERAL for prefix in batch]
    return PrefixGroups(singles, batches)


def levels_of(groups: Sequence[Sequence[SharedPrefix[F]]], n_queries: int) -> list[list[int]]:
    """Distribute groups over levels, so that no query belongs to two groups of a level.

    Args:
        groups: prefixes of each group.
        n_queries: number of packed queries.

    Returns:
        Indices into `groups`, per level.
    """
    levels: list[list[int]] = []
    depth = [0] * n_queries
    for number, group in enumerate(groups):
        queries = [query for prefix in group for query in range(prefix.start, prefix.stop)]
        level = max([depth[query] for query in queries])
        for query in queries:
            depth[query] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(number)
    return levels


class QueryPadding(NamedTuple):
    """Queries of a batch, padded to the same number per prefix.

    Args:
        n_queries: queries per prefix, including padding.
        padded: packed index of each of the P * n_queries queries.
        kept: indices into `padded` without padding; None if there is none.
        where: packed indices of the queries in `kept`.
    """

    n_queries: int
    padded: list[int]
    kept: list[int] | None
    where: list[int]


def pad_queries(batch: Sequence[SharedPrefix[F]]) -> QueryPadding:
    """Pad the queries of each prefix by repeating its last query."""
    n_queries = max(prefix.stop - prefix.start for prefix in batch)
    padded: list[int] = []
    kept: list[int] = []
    where: list[int] = []
    for number, prefix in enumerate(batch):
        queries = range(prefix.start, prefix.stop)
        padded += [queries[min(i, len(queries) - 1)] for i in range(n_queries)]
        kept += [number * n_queries + i for i in range(len(queries))]
        where += queries
    return QueryPadding(n_queries, padded, None if len(kept) == len(padded) else kept, where)


class VisibleKeys(NamedTuple):
    """Keys of a prefix inside the sliding window of at least one query.

    Args:
        low: index of the first one; all later keys follow.
        is_masked: True if some query does not see all of them.
    """

    low: int
    is_masked: bool


def visible_keys(
    first: int, length: int, window: int | None, positions: Sequence[int]
) -> VisibleKeys | None:
    """Return the keys that queries see through a sliding window; None if they see none.

    A key is visible if it is less than `window` positions before the query::

        oldest query                     newest query
        ├── window ──┤ sees from low     ├── window ──┤ sees all after `newest - window`

    Args:
        first: absolute position of the first key.
        length: number of keys.
        window: size of the sliding window; None for full attention.
        positions: absolute positions of the queries.
    """
    if window is None:
        return VisibleKeys(0, False)
    oldest, newest = min(positions), max(positions)
    if first + length - 1 <= oldest - window:
        return None
    low = max(0, oldest - window + 1 - first)
    return VisibleKeys(low, first + low <= newest - window)
