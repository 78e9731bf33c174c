from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.loom.stop_strings import StopStrings


def naive_stop(stops: tuple[str, ...], pieces: list[bytes]) -> list[str | None]:
    """After each piece: the stop string that ends first within it, the longest of those."""
    answers: list[str | None] = []
    for n in range(1, len(pieces) + 1):
        full, observed = b"".join(pieces[:n]), len(b"".join(pieces[: n - 1]))
        answers.append(None)
        for end in range(observed + 1, len(full) + 1):
            ending = [stop for stop in stops if full[:end].endswith(stop.encode())]
            if ending:
                answers[-1] = max(ending, key=lambda stop: len(stop.encode()))
                break
    return answers


@given(
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=4, unique=True),
    st.lists(st.sampled_from([b"", b"a", b"b", b"ab", b"bab", b"\xc3", b"\xa9", b"a\xc3"])),
)
def test_stop_strings_equal_the_naive_search(stops: list[str], pieces: list[bytes]) -> None:
    watch = StopStrings(tuple(stops))
    assert [watch.push(piece) for piece in pieces] == naive_stop(tuple(stops), pieces)


def test_stop_string_is_matched_at_the_token_that_completes_it() -> None:
    watch = StopStrings(("\n\nUser:",))
    assert [watch.push(piece) for piece in (b"a\n", b"\nUs", b"er", b":")] == [
        None,
        None,
        None,
        "\n\nUser:",
    ]


@pytest.mark.parametrize(
    ("stops", "piece", "expected"),
    [
        (("c", "abc"), b"abc", "abc"),
        (("bcd", "b"), b"abcd", "b"),
        (("x", "dc"), b"adcx", "dc"),
    ],
)
def test_first_end_wins_and_the_longest_of_equal_ends(
    stops: tuple[str, ...], piece: bytes, expected: str
) -> None:
    assert StopStrings(stops).push(piece) == expected


def test_tail_stays_short() -> None:
    stops = StopStrings(("abc",))
    for _ in range(100):
        assert stops.push(b"xxab") is None
    assert len(stops._tail) == 2
    assert stops.push(b"c") == "abc"
    assert StopStrings(()).push(b"anything") is None
