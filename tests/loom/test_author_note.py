"""The author's note: its place in the context, and nodes that do not contain it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import weft
from shallow import shallow
from weft import LM, Heddle, Loom
from weft.errors import ConfigError
from weft.loom.author_note import AuthorNote, place_with_note
from weft.loom.node import set_tokens

TEXT = "One.\nTwo.\n\nThree.\nFour"


@cache
def model() -> LM:
    return weft.load(shallow(), engine="numpy")


def context(node: Heddle, depth: int) -> str:
    lm = model()
    return lm.text.decode(place_with_note(node, AuthorNote("[N]", depth)).ids()).removeprefix(
        "<|bos|>"
    )


def question(node: Heddle, text: str) -> Heddle:
    child = node.add(model().turn_delta([{"role": "user", "content": text}]))
    child.meta["said"] = text
    return child


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, f"{TEXT}\n[N]\n"),
        (1, "One.\nTwo.\n\nThree.\n[N]\nFour"),
        (3, "One.\nTwo.\n[N]\n\nThree.\nFour"),
        (4, "One.\n[N]\nTwo.\n\nThree.\nFour"),
        (5, f"[N]\n{TEXT}"),
        (99, f"[N]\n{TEXT}"),
    ],
)
def test_note_is_a_line_before_the_last_line_breaks(depth: int, expected: str) -> None:
    loom = Loom(model(), "One.\nTwo.", template=False)
    assert context(loom.add("\n\nThree.\nFour"), depth) == expected


def test_note_of_an_empty_path_is_its_only_text() -> None:
    loom = Loom(model(), "One.", template=False)
    set_tokens(loom, [])
    assert context(loom, 1) == "[N]\n"


@pytest.mark.parametrize(
    ("depth", "changed"),
    [
        (0, {2: "Why?\n\n[N]"}),
        (1, {2: "[N]\n\nWhy?"}),
        (2, {0: "Hi\n\n[N]"}),
        (3, {0: "[N]\n\nHi"}),
        (9, {0: "[N]\n\nHi"}),
    ],
)
def test_note_of_a_chat_is_a_paragraph_of_a_user_message(depth: int, changed: Any) -> None:
    lm = model()
    node = question(Loom(lm, "Hi").add("Hello"), "Why?")
    first, second = (changed.get(at, text) for at, text in ((0, "Hi"), (2, "Why?")))
    expected = question(Loom(lm, first).add("Hello"), second)
    assert place_with_note(node, AuthorNote("[N]", depth)).ids() == expected.get_prefix_tokens()


def test_note_after_an_answer_ends_the_question_before_it() -> None:
    lm = model()
    answer = Loom(lm, "Hi").add("Hello")
    expected = Loom(lm, "Hi\n\n[N]").add("Hello").get_prefix_tokens()
    assert place_with_note(answer, AuthorNote("[N]", 0)).ids() == expected


def test_note_of_a_continued_answer_is_in_the_question_before_it() -> None:
    lm = model()
    answer = Loom(lm, "Hi", system="Be brief.").add("Hello")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "[N]\n\nHi"},
    ]
    expected = Loom(lm, messages).add("Hello").get_prefix_tokens()
    assert place_with_note(answer, AuthorNote("[N]", 2)).ids() == expected


@pytest.mark.parametrize("way", ["grow", "stream"])
def test_growth_with_note_equals_growth_of_the_text_with_the_note(way: str) -> None:
    lm = model()
    loom, twin = (
        Loom(lm, text, template=False) for text in (TEXT, "One.\nTwo.\n\nThree.\n[N]\nFour")
    )
    loom.grow(max_tokens=6, seed=1)
    loom.note = AuthorNote("[N]", 1)
    options = {"n": 2, "max_tokens": 6, "seed": 1}
    if way == "grow":
        noted = list(loom.grow(**options))
    else:
        for _ in loom.stream(**options):
            pass
        noted = loom.children[1:]
    loom.note = None
    twin.grow(max_tokens=6, seed=1)  # the branch numbers select the random streams
    expected = twin.grow(**options)
    assert [node.tokens for node in noted] == [node.tokens for node in expected]
    assert [node.logprobs for node in noted] == [node.logprobs for node in expected]
    # The nodes have the path without the note.
    assert noted[0].get_prefix_tokens() == [*loom.tokens, *noted[0].tokens]
    assert noted[0].place.ids() == noted[0].get_prefix_tokens()
    plain = Loom(lm, TEXT, template=False).add(noted[0].tokens)
    assert noted[0].next(3) == plain.next(3)


def test_tokens_before_the_note_are_computed_once() -> None:
    with weft.load(shallow(), engine="numpy") as lm:
        loom = Loom(lm, "word " * 60 + "\nThe end", template=False)
        loom.grow(max_tokens=2, seed=1)
        before = lm.stats().prefilled
        loom.note = AuthorNote("[N]", 1)
        loom.grow(max_tokens=2, seed=1)
        assert lm.stats().prefilled - before < 20


def test_note_is_saved_and_wrong_values_raise(tmp_path: Path) -> None:
    loom = Loom(model(), TEXT, template=False)
    assert loom.note is None
    loom.note = "Be sad."
    assert loom.note == AuthorNote("Be sad.", 4)
    loom.save(tmp_path / "a.loom.json")
    assert Loom.open(tmp_path / "a.loom.json").note == loom.note
    for wrong in (
        "text",
        {"depth": 1},
        {"text": ""},
        {"text": "a", "depth": -1},
        {"text": "a", "x": 1},
    ):
        loom.meta["author_note"] = wrong
        with pytest.raises(ConfigError):
            loom.grow(max_tokens=1)
    assert not loom.children


def test_search_uses_the_note() -> None:
    lm = model()
    loom = Loom(lm, TEXT, template=False)
    loom.note = AuthorNote("[N]", 1)
    twin = Loom(lm, "One.\nTwo.\n\nThree.\n[N]\nFour", template=False)
    noted, expected = (
        weft.search.best_of_n(lm, each, n=2, max_tokens=4, seed=1) for each in (loom, twin)
    )
    assert [n.tokens for n in noted.loom.children] == [n.tokens for n in expected.loom.children]
