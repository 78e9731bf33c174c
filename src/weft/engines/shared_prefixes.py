"""The KV that queries of one step share, grouped into few attention calls. Integers only.

An attention call per span of KV costs time for each span, however short. A tree search steps dozens
of nodes of a dozen tokens, most with few queries. Spans that follow each other and have the same
queries are therefore merged. Short ones are copied into a padded batch with one call.

Engines with padded KV share this module. Each of them holds the tensors of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from .padded_pool import F, PaddedPool

# A span with up to MAX_SHORT slots and MAX_BATCH_QUERIES queries is copied into a batch, if the
# batch has at least MIN_BATCH prefixes.
MAX_SHORT = 64
MAX_BATCH_QUERIES = 16
MIN_BATCH = 3
# Consecutive spans with the same queries are merged up to this many slots. An attention call costs
# as much as some hundred slots, and moved slots mostly stay in place.
MAX_MERGED = 1024
MAX_MOVES = 64
# Merged prefixes up to this many slots are copied into a batch instead of moved.
MAX_COPIED = 256


class QuerySpan(NamedTuple, Generic[F]):
    """One span of KV and the packed queries start … stop - 1 that attend to it.

    Args:
        fragment: fragment that holds the span.
        length: slots of the span.
        first: absolute position of its first slot.
        start: first packed query.
        stop: one more than the last packed query.
        grows: True if a row of the step writes to the fragment, which must then stay in place.
    """

    fragment: F
    length: int
    first: int
    start: int
    stop: int
    grows: bool = False


class SharedPrefix(NamedTuple, Generic[F]):
    """Consecutive spans with the same packed queries start … stop - 1.

    Args:
        spans: fragments and the number of slots of each.
        length: slots of all spans.
        first: absolute position of the first slot.
        start: first packed query.
        stop: one more than the last packed query.
    """

    spans: tuple[tuple[F, int], ...]
    length: int
    first: int
    start: int
    stop: int

    @property
    def is_short(self) -> bool:
        """True if it may be copied into a batch."""
        return self.length <= (MAX_SHORT if len(self.spans) == 1 else MAX_COPIED)

    @property
    def size(self) -> int:
        """Size class. Prefixes of one class waste little when padded to the longest."""
        return max(self.length, MAX_SHORT).bit_length()


def find_shared_prefixes(
    query_spans: Sequence[QuerySpan[F]], memory: PaddedPool[F, Any]
) -> list[SharedPrefix[F]]:
    """Merge spans that follow each other and have the same queries.

    A search that continues from the best node of each round has many such spans. Each would cost an
    attention call per layer. Spans in adjacent slots are always merged.

    Other spans are moved next to each other only up to MAX_MERGED slots, so that a growing path is
    not moved repeatedly. Each is moved at most MAX_MOVES times: paths that diverge below would
    otherwise move it back and forth.

    Args:
        query_spans: spans in the order of `Packing.query_spans`.
        memory: the pool that holds the fragments.
    """
    growing = {id(query_span.fragment) for query_span in query_spans if query_span.grows}

    def may_merge(upper: SharedPrefix[F], lower: SharedPrefix[F]) -> bool:
        ends = id(upper.spans[-1][0]), id(lower.spans[-1][0])
        return _follows(upper, lower) and growing.isdisjoint(ends)

    adjacent: list[SharedPrefix[F]] = []
    for fragment, length, first, start, stop, _ in query_spans:
        lower = SharedPrefix(((fragment, length),), length, first, start, stop)
        upper = adjacent[-1] if adjacent else None
        if upper and may_merge(upper, lower) and memory.is_adjacent(upper.spans[-1][0], fragment):
            adjacent[-1] = _merge(upper, lower)
        else:
            adjacent.append(lower)
    merged: list[SharedPrefix[F]] = []
    upper_may_move = False
    for lower in adjacent:
        upper = merged[-1] if merged else None
        may_move = all(kv.n_moves < MAX_MOVES for kv, _ in lower.spans)
        if (
            upper
            and upper_may_move
            and may_move
            and max(upper.length, lower.length) <= MAX_MERGED
            and may_merge(upper, lower)
        ):
            merged[-1] = _merge(upper, lower)
        else:
            merged.append(lower)
        upper_may_move = may_move
    return merged


def _follows(upper: SharedPrefix[F], lower: SharedPrefix[F]) -> bool:
    """Return True if `lower` has the same queries as `upper` and starts where it ends."""
    fragment, length = upper.spans[-1]
    is_below = upper.first + upper.length == lower.first and fragment.length == length
    return is_below and (upper.start, upper.stop) == (lower.start, lower.stop)


def _merge(upper: SharedPrefix[F], lower: SharedPrefix[F]) -> SharedPrefix[F]:
    """Return one shared prefix with the spans of both."""
    spans, length = (*upper.spans, *lower.spans), upper.length + lower.length
    return SharedPrefix(spans, length, upper.first, upper.start, upper.stop)


class PrefixGroups(NamedTuple, Generic[F]):
    """Shared prefixes, grouped by attention call.

    Args:
        singles: prefixes with a call of their own.
        batches: short prefixes of similar length with one call per list. No query belongs to two
            prefixes of a batch.
    """

    singles: list[SharedPrefix[F]]
    batches: list[list[SharedPrefix[F]]]


def group_prefixes(
    query_spans: Sequence[QuerySpan[F]], memory: PaddedPool[F, Any]
) -> PrefixGroups[F]:
    """Merge spans and put short ones with few queries into batches."""
    singles: list[SharedPrefix[F]] = []
    by_size: dict[tuple[int, int], list[SharedPrefix[F]]] = {}
    depth: dict[int, int] = {}  # short prefixes above, by query
    for prefix in find_shared_prefixes(query_spans, memory):
        queries = range(prefix.start, prefix.stop)
        if not prefix.is_short or len(queries) > MAX_BATCH_QUERIES:
            singles.append(prefix)
            continue
        level = max(depth.get(query, 0) for query in queries)
        depth.update(dict.fromkeys(queries, level + 1))
        by_size.setdefault((level, prefix.size), []).append(prefix)
    batches = [batch for batch in by_size.values() if len(batch) >= MIN_BATCH]
    singles += [prefix for batch in by_size.values() if len(batch) < MIN_BATCH for prefix in batch]
    return PrefixGroups(singles, batches)


def assign_levels(groups: Sequence[Sequence[SharedPrefix[F]]], n_queries: int) -> list[list[int]]:
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
    """The keys of a prefix that some query sees through its sliding window.

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
