"""Short spans one below the other are put together; all else stays as it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from weft.engines.packing import (
    COPIED,
    JOINED,
    MOST_MOVES,
    SHORT,
    QuerySpan,
    SharedPrefix,
    shared_prefixes_of,
)
from weft.engines.padded_pool import PaddedFragment

Reaches = list[QuerySpan[PaddedFragment]]


class Apart:
    """Stands in for a memory in which no fragments lie side by side, but those that are named."""

    def __init__(self, *next_to: tuple[PaddedFragment, PaddedFragment]) -> None:
        self.pairs = next_to

    def is_next(self, upper: PaddedFragment, lower: PaddedFragment) -> bool:
        return any(upper is one and lower is other for one, other in self.pairs)


def chain(*lengths: int, start: int = 0, stop: int = 8) -> Reaches:
    """Spans one below the other, above the queries start..stop."""
    first, found = 0, []
    for length in lengths:
        fragment = PaddedFragment()
        fragment.length = length
        found.append(QuerySpan(fragment, length, first, start, stop))
        first += length
    return found


def found_of(reaches: Reaches, memory: Any = None) -> list[SharedPrefix[PaddedFragment]]:
    return shared_prefixes_of(reaches, memory or Apart())


def lengths_of(reaches: Reaches, memory: Any = None) -> list[list[int]]:
    return [[length for _, length in stretch.spans] for stretch in found_of(reaches, memory)]


def test_short_spans_with_the_same_queries_are_one_stretch() -> None:
    reaches = chain(3, JOINED - 5, 5)
    (stretch,) = found_of(reaches)
    assert stretch.spans == tuple((reach.fragment, reach.length) for reach in reaches)
    assert stretch[1:] == (JOINED + 3, 0, 0, 8)


def test_long_spans_and_what_is_below_other_queries_stay_apart() -> None:
    assert lengths_of(chain(3, JOINED + 1, 5, 6)) == [[3], [JOINED + 1], [5, 6]]
    assert lengths_of([*chain(3, 4), *chain(3, 4, stop=7)]) == [[3, 4], [3, 4]]
    trunk = chain(20)
    left = [r._replace(first=r.first + 20) for r in chain(2, 2, stop=4)]
    right = [r._replace(first=r.first + 20) for r in chain(2, 2, start=4)]
    assert lengths_of([*trunk, *left, *right]) == [[20], [2, 2], [2, 2]]


def test_a_path_that_grows_is_not_moved_again_and_again() -> None:
    """What has come together to more than JOINED stays, and the next ones begin anew."""
    each = JOINED // 4
    for n in range(1, 20):
        found = found_of(chain(*[each] * n))
        assert [len(s.spans) for s in found] == [5] * (n // 5) + [n % 5] * (n % 5 > 0)
        for one, other in pairwise(found):
            assert other.first == one.first + one.length


def test_what_was_moved_often_stays_where_it_is() -> None:
    """Two paths that part below a trunk, stepped in turn, would take it to and fro."""
    reaches = chain(3, 4, 5, 6)
    fragments = [reach.fragment for reach in reaches]
    fragments[1].n_moves = MOST_MOVES - 1
    assert lengths_of(reaches) == [[3, 4, 5, 6]]
    fragments[1].n_moves += 1
    assert lengths_of(reaches) == [[3], [4], [5, 6]]
    memory = Apart((fragments[0], fragments[1]))
    assert lengths_of(reaches, memory) == [[3, 4], [5, 6]]  # they need not be moved


def test_those_side_by_side_are_one_however_long() -> None:
    reaches = chain(JOINED, JOINED, 3, JOINED, 5)
    fragments = [reach.fragment for reach in reaches]
    memory = Apart(*pairwise(fragments[:4]))
    assert lengths_of(reaches, memory) == [[JOINED, JOINED, 3, JOINED], [5]]
    fragments[1].length += 1  # the path ends within it
    assert lengths_of(reaches, memory) == [[JOINED, JOINED], [3, JOINED], [5]]


def test_tails_and_what_ends_early_have_nothing_below_them() -> None:
    reaches = chain(3, 4, 5)
    tail = reaches[2]._replace(grows=True)
    assert lengths_of([*reaches[:2], tail]) == [[3, 4], [5]]
    side = Apart((reaches[1].fragment, reaches[2].fragment))
    assert lengths_of([*reaches[:2], tail], side) == [[3, 4], [5]]
    reaches[1].fragment.length = 6
    assert lengths_of(reaches) == [[3, 4], [5]]


def test_short_ones_and_several_up_to_a_size_join_bundles() -> None:
    for lengths, is_short in (
        ([SHORT], True),
        ([SHORT + 1], False),
        ([COPIED - SHORT, SHORT], True),
        ([COPIED - SHORT, SHORT + 1], False),
    ):
        (stretch,) = found_of(chain(*lengths))
        assert stretch.is_short == is_short


def test_stretches_of_about_one_length_have_one_size() -> None:
    sizes = [found_of(chain(*[32] * n))[0].size for n in (1, 2, 3, 4, 6, 7, 8)]
    assert sizes == [7, 7, 7, 8, 8, 8, 9]
