from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.tokens.text import StopStrings, TextStream

# Whole and cut characters, stray continuation bytes, overlong and surrogate forms.
PIECES = [
    b"",
    b" ",
    b"a",
    b" ab",
    "é".encode(),
    "日".encode()[:1],
    "日".encode()[1:],
    "🙂".encode()[:3],
    "🙂".encode()[3:],
    b"\xff",
    b"\x80",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"\xf0\x9f",
]
ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


@given(ids)
def test_streamed_text_equals_one_decode_of_all_bytes(tokens: list[int]) -> None:
    stream = TextStream(PIECES)
    text = "".join(stream.push(token) for token in tokens) + stream.flush()
    assert text == b"".join(PIECES[token] for token in tokens).decode(errors="replace")


@given(ids)
def test_a_dummy_space_is_left_out_once_at_the_start(tokens: list[int]) -> None:
    stream = TextStream(PIECES, strip_first_space=True)
    text = "".join(stream.push(token) for token in tokens) + stream.flush()
    joined = b"".join(PIECES[token] for token in tokens)
    assert text == joined.removeprefix(b" ").decode(errors="replace")


def test_an_unfinished_character_waits() -> None:
    stream = TextStream(["日".encode()[:2], "日".encode()[2:]])
    assert stream.push(0) == ""
    assert stream.push(1) == "日"
    assert stream.push(0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_clone_waits_for_the_same_character() -> None:
    """What follows is no part of it: the character is broken, in both."""
    stream = TextStream(["日".encode()[:2], b"a", "日".encode()[2:]])
    stream.push(0)
    twin, other = stream.clone(), stream.clone()
    assert stream.push(1) == twin.push(1) == "\ufffda"
    assert other.push(2) == "日"


def test_ids_above_the_vocabulary_have_no_text() -> None:
    stream = TextStream([b"a"])
    assert stream.push(7) + stream.push(0) == "a"


def naive_stop(stops: tuple[str, ...], pieces: list[bytes]) -> list[str | None]:
    """After each piece: the stop string that ends first within it, the longest of those."""
    answers: list[str | None] = []
    for n in range(1, len(pieces) + 1):
        whole, seen = b"".join(pieces[:n]), len(b"".join(pieces[: n - 1]))
        answers.append(None)
        for end in range(seen + 1, len(whole) + 1):
            ending = [stop for stop in stops if whole[:end].endswith(stop.encode())]
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


def test_a_stop_string_is_seen_at_the_token_that_completes_it() -> None:
    watch = StopStrings(("\n\nUser:",))
    assert [watch.push(piece) for piece in (b"a\n", b"\nUs", b"er", b":")] == [
        None,
        None,
        None,
        "\n\nUser:",
    ]


@pytest.mark.parametrize(
    ("stops", "piece", "found"),
    [
        (("c", "abc"), b"abc", "abc"),
        (("bcd", "b"), b"abcd", "b"),
        (("x", "dc"), b"adcx", "dc"),
    ],
)
def test_the_first_end_wins_and_of_equal_ends_the_longest(
    stops: tuple[str, ...], piece: bytes, found: str
) -> None:
    assert StopStrings(stops).push(piece) == found


def test_a_clone_watches_on_its_own_and_the_tail_stays_short() -> None:
    first = StopStrings(("abc",))
    for _ in range(100):
        assert first.push(b"xxab") is None
    second = first.clone()
    assert second.push(b"c") == "abc"
    assert first.push(b"b") is None
    assert first.push(b"c") is None
    assert len(first._tail) == 2
    assert StopStrings(()).push(b"anything") is None
