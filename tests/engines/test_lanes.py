"""Short spans one below the other are put together; all else stays as it is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weft.engines import lanes
from weft.engines.lanes import JOINED, Reach, stretches_of


def chain(*lengths: int, start: int = 0, stop: int = 8) -> list[Reach[str]]:
    """Spans one below the other, above the queries start..stop."""
    first, found = 0, []
    for number, length in enumerate(lengths):
        found.append(Reach(f"{start}.{number}", length, first, start, stop))
        first += length
    return found


def lengths_of(reaches: list[Reach[str]]) -> list[list[int]]:
    return [[length for _, length in stretch.spans] for stretch in stretches_of(reaches)]


def test_short_spans_with_the_same_queries_are_one_stretch() -> None:
    reaches = chain(3, JOINED, 5)
    (stretch,) = stretches_of(reaches)
    assert [fragment for fragment, _ in stretch.spans] == ["0.0", "0.1", "0.2"]
    assert stretch[1:] == (JOINED + 8, 0, 0, 8)
    assert stretch.is_short


def test_long_spans_and_what_is_below_other_queries_stay_apart() -> None:
    assert lengths_of(chain(3, JOINED + 1, 5, 6)) == [[3], [JOINED + 1], [5, 6]]
    assert lengths_of([*chain(3, 4), *chain(3, 4, stop=7)]) == [[3, 4], [3, 4]]
    trunk = chain(20)
    left = [r._replace(first=r.first + 20) for r in chain(2, 2, stop=4)]
    right = [r._replace(first=r.first + 20) for r in chain(2, 2, start=4)]
    assert lengths_of([*trunk, *left, *right]) == [[20], [2, 2], [2, 2]]


@pytest.mark.parametrize("most", [0, 1, 10, 25, 1000])
def test_no_more_is_copied_than_is_said(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(lanes, "MOST_COPIED", most)
    reaches = chain(4, 6, 5, 7, 3) + chain(4, 4, start=8, stop=9)
    found = stretches_of(reaches)
    assert sum(s.length for s in found if len(s.spans) > 1) <= most
    assert [span for s in found for span in s.spans] == [(r.fragment, r.length) for r in reaches]
    for one, other in pairwise(found):
        assert other.first in (0, one.first + one.length)


def test_stretches_of_about_one_length_have_one_size() -> None:
    sizes = [stretches_of(chain(*[32] * n))[0].size for n in (1, 2, 3, 4, 6, 7, 8)]
    assert sizes == [7, 7, 7, 8, 8, 8, 9]
