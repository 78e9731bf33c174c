from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft._core.tokens.text import TextStream

# Complete and cut characters, stray continuation bytes, overlong and surrogate forms.
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
def test_dummy_space_at_the_start_is_removed_once(tokens: list[int]) -> None:
    stream = TextStream(PIECES, strip_first_space=True)
    text = "".join(stream.push(token) for token in tokens) + stream.flush()
    joined = b"".join(PIECES[token] for token in tokens)
    assert text == joined.removeprefix(b" ").decode(errors="replace")


def test_incomplete_character_waits_for_its_bytes() -> None:
    stream = TextStream(["日".encode()[:2], "日".encode()[2:]])
    assert stream.push(0) == ""
    assert stream.push(1) == "日"
    assert stream.push(0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_clone_waits_for_the_same_character() -> None:
    """The next token does not complete it: the character is broken, in both streams."""
    stream = TextStream(["日".encode()[:2], b"a", "日".encode()[2:]])
    stream.push(0)
    twin, other = stream.clone(), stream.clone()
    assert stream.push(1) == twin.push(1) == "\ufffda"
    assert other.push(2) == "日"


def test_ids_above_the_vocabulary_have_no_text() -> None:
    stream = TextStream([b"a"])
    assert stream.push(7) + stream.push(0) == "a"
