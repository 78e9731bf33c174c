"""Model text is harmless wherever it is shown."""

from __future__ import annotations

import html

from hypothesis import given
from hypothesis import strategies as st

from weft.viz.terminal import as_html, cut, escape_controls, one_line


@given(st.text(alphabet=st.characters(codec=None)))
def test_html_escaping_keeps_all_that_is_visible_and_no_control(text: str) -> None:
    new = as_html(text)
    assert not set('<>"') & set(new)
    assert html.unescape(new) == escape_controls(text, keep="\n\t")
    new.encode("utf-8")
    assert all(c.isprintable() or c in "\n\t" or c.isspace() or c in "\u200c\u200d" for c in new)


def test_controls_bidi_marks_and_lone_surrogates_are_written_out() -> None:
    assert escape_controls("a\x00\x1b\u202e\ud800\ufeff") == "a\\x00\\x1b\\u202e\\ud800\\ufeff"


def test_spaces_and_emoji_stay() -> None:
    assert escape_controls("a\u00a0b\u3000 👩\u200d🚀") == "a\u00a0b\u3000 👩\u200d🚀"


def test_one_line_marks_line_ends_within() -> None:
    assert one_line("a\r\nb\n") == "a\\r⏎b"


def test_cut_of_a_long_text_ends_with_an_ellipsis() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdef", 4) == "abc…"
