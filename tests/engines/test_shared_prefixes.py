"""Merging of consecutive spans, grouping of short prefixes, and their masks."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

from weft.engines.padded_pool import PaddedFragment
from weft.engines.shared_prefixes import (
    MAX_BATCH_QUERIES,
    MAX_COPIED,
    MAX_MERGED,
    MAX_MOVES,
    MAX_SHORT,
    MIN_BATCH,
    QuerySpan,
    SharedPrefix,
    assign_levels,
    find_shared_prefixes,
    group_prefixes,
    pad_queries,
    visible_keys,
)

QuerySpans = list[QuerySpan[PaddedFragment]]


class Apart:
    """Stands in for a memory in which no fragments lie side by side, but those that are named."""

    def __init__(self, *next_to: tuple[PaddedFragment, PaddedFragment]) -> None:
        self.pairs = next_to

    def is_adjacent(self, upper: PaddedFragment, lower: PaddedFragment) -> bool:
        return any(upper is one and lower is other for one, other in self.pairs)


def chain(*lengths: int, start: int = 0, stop: int = 8) -> QuerySpans:
    """Spans one below the other, above the queries start..stop."""
    first, result = 0, []
    for length in lengths:
        fragment = PaddedFragment()
        fragment.length = length
        result.append(QuerySpan(fragment, length, first, start, stop))
        first += length
    return result


def prefixes_of(query_spans: QuerySpans, memory: Any = None) -> list[SharedPrefix[PaddedFragment]]:
    return find_shared_prefixes(query_spans, memory or Apart())


def lengths_of(query_spans: QuerySpans, memory: Any = None) -> list[list[int]]:
    return [[length for _, length in stretch.spans] for stretch in prefixes_of(query_spans, memory)]


def test_adjacent_short_spans_with_equal_queries_are_merged() -> None:
    query_spans = chain(3, MAX_MERGED - 5, 5)
    (stretch,) = prefixes_of(query_spans)
    assert stretch.spans == tuple(
        (query_span.fragment, query_span.length) for query_span in query_spans
    )
    assert stretch[1:] == (MAX_MERGED + 3, 0, 0, 8)


def test_long_spans_and_spans_of_other_queries_are_not_merged() -> None:
    assert lengths_of(chain(3, MAX_MERGED + 1, 5, 6)) == [[3], [MAX_MERGED + 1], [5, 6]]
    assert lengths_of([*chain(3, 4), *chain(3, 4, stop=7)]) == [[3, 4], [3, 4]]
    trunk = chain(20)
    left = [r._replace(first=r.first + 20) for r in chain(2, 2, stop=4)]
    right = [r._replace(first=r.first + 20) for r in chain(2, 2, start=4)]
    assert lengths_of([*trunk, *left, *right]) == [[20], [2, 2], [2, 2]]


def test_growing_path_is_not_moved_repeatedly() -> None:
    """A merged run of more than MAX_MERGED slots stays, and the next spans start another."""
    each = MAX_MERGED // 4
    for n in range(1, 20):
        result = prefixes_of(chain(*[each] * n))
        assert [len(s.spans) for s in result] == [5] * (n // 5) + [n % 5] * (n % 5 > 0)
        for one, other in pairwise(result):
            assert other.first == one.first + one.length


def test_fragment_moved_often_is_not_moved_once_more() -> None:
    """Two paths that part below a trunk, stepped in turn, would take it to and fro."""
    query_spans = chain(3, 4, 5, 6)
    fragments = [query_span.fragment for query_span in query_spans]
    fragments[1].n_moves = MAX_MOVES - 1
    assert lengths_of(query_spans) == [[3, 4, 5, 6]]
    fragments[1].n_moves += 1
    assert lengths_of(query_spans) == [[3], [4], [5, 6]]
    memory = Apart((fragments[0], fragments[1]))
    assert lengths_of(query_spans, memory) == [[3, 4], [5, 6]]  # they need not be moved


def test_contiguous_spans_are_merged_at_any_length() -> None:
    query_spans = chain(MAX_MERGED, MAX_MERGED, 3, MAX_MERGED, 5)
    fragments = [query_span.fragment for query_span in query_spans]
    memory = Apart(*pairwise(fragments[:4]))
    assert lengths_of(query_spans, memory) == [[MAX_MERGED, MAX_MERGED, 3, MAX_MERGED], [5]]
    fragments[1].length += 1  # the path ends within it
    assert lengths_of(query_spans, memory) == [[MAX_MERGED, MAX_MERGED], [3, MAX_MERGED], [5]]


def test_growing_and_partly_used_fragments_are_not_merged_with_lower_ones() -> None:
    query_spans = chain(3, 4, 5)
    tail = query_spans[2]._replace(grows=True)
    assert lengths_of([*query_spans[:2], tail]) == [[3, 4], [5]]
    side = Apart((query_spans[1].fragment, query_spans[2].fragment))
    assert lengths_of([*query_spans[:2], tail], side) == [[3, 4], [5]]
    query_spans[1].fragment.length = 6
    assert lengths_of(query_spans) == [[3, 4], [5]]


def test_short_prefixes_are_put_into_batches() -> None:
    for lengths, is_short in (
        ([MAX_SHORT], True),
        ([MAX_SHORT + 1], False),
        ([MAX_COPIED - MAX_SHORT, MAX_SHORT], True),
        ([MAX_COPIED - MAX_SHORT, MAX_SHORT + 1], False),
    ):
        (stretch,) = prefixes_of(chain(*lengths))
        assert stretch.is_short == is_short


def test_prefixes_of_similar_length_have_one_size() -> None:
    sizes = [prefixes_of(chain(*[32] * n))[0].size for n in (1, 2, 3, 4, 6, 7, 8)]
    assert sizes == [7, 7, 7, 8, 8, 8, 9]


def random_tree(rng: random.Random, n_queries: int) -> QuerySpans:
    """Spans of a random tree, depth first; each node is above a slice of its parent's queries."""
    spans: QuerySpans = []

    def node(start: int, stop: int, first: int) -> None:
        length = rng.choice((1, 5, MAX_SHORT, MAX_SHORT + 1, 300))
        fragment = PaddedFragment()
        fragment.length = length
        spans.append(QuerySpan(fragment, length, first, start, stop))
        if stop - start > 1 and rng.random() < 0.8:
            cut = rng.randint(start + 1, stop - 1)
            for part in ((start, cut), (cut, stop)):
                if rng.random() < 0.9:
                    node(*part, first + length)

    node(0, n_queries, 0)
    return spans


def test_groups_of_random_trees_cover_each_query_once() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        n_queries = rng.randint(1, 60)
        spans = random_tree(rng, n_queries)
        prefixes = find_shared_prefixes(spans, Apart())  # type: ignore[arg-type]
        singles, batches = group_prefixes(spans, Apart())  # type: ignore[arg-type]
        assert len(prefixes) == len(singles) + sum(map(len, batches))
        assert set(prefixes) == {*singles, *(each for batch in batches for each in batch)}
        for batch in batches:
            assert len(batch) >= MIN_BATCH
            assert all(
                each.is_short and each.stop - each.start <= MAX_BATCH_QUERIES for each in batch
            )
            for one, other in combinations(batch, 2):
                assert one.stop <= other.start or other.stop <= one.start
        groups = [*([single] for single in singles), *batches]
        levels = assign_levels(groups, n_queries)
        assert sorted(number for level in levels for number in level) == list(range(len(groups)))
        for level in levels:
            queries = [
                query
                for number in level
                for each in groups[number]
                for query in range(each.start, each.stop)
            ]
            assert len(queries) == len(set(queries))


def test_queries_of_a_batch_are_padded_with_the_last_query_of_a_prefix() -> None:
    batch = [
        SharedPrefix(((PaddedFragment(), 1),), 1, 0, start, stop)
        for start, stop in ((4, 6), (0, 3), (8, 9))
    ]
    assert pad_queries(batch) == (
        3,
        [4, 5, 5, 0, 1, 2, 8, 8, 8],
        [0, 1, 3, 4, 5, 6],
        [4, 5, 0, 1, 2, 8],
    )
    assert pad_queries(batch[:1]).kept is None


def test_visible_keys_equal_those_of_a_mask() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        first, length = rng.randint(0, 20), rng.randint(1, 20)
        positions = [first + length + rng.randint(0, 12) for _ in range(rng.randint(1, 5))]
        window = rng.choice((None, rng.randint(1, 40)))
        keys = range(first, first + length)
        observed = [[window is None or key > at - window for key in keys] for at in positions]
        visible = visible_keys(first, length, window, positions)
        if not any(map(any, observed)):
            assert visible is None
            continue
        columns = [any(column) for column in zip(*observed, strict=True)]
        assert visible is not None
        assert visible.low == columns.index(True)
        assert visible.is_masked == (not all(all(row[visible.low :]) for row in observed))
