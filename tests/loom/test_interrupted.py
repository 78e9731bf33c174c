"""Ctrl-C at any bytecode of a growing call or an edit: what there is of the tree is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from interrupts import between_lines, interrupted, quick_collections
from weft import Heddle, Loom

# Where a tree is changed. The scheduler below has laws of its own.
PLACES = ("loom/grow.py", "loom/known.py", "loom/node.py")
OPTIONS: dict[str, Any] = {"max_tokens": 3, "seed": 4, "temperature": 1.0}

Told = dict[int, list[int]]  # tokens by branch, as far as they were told to the caller


def grown(loom: Loom, told: Told) -> None:
    loom.grow(2, **OPTIONS)


def streamed(loom: Loom, told: Told) -> None:
    for delta in loom.stream(2, **OPTIONS):
        told.setdefault(delta.branch, []).extend(delta.token_ids)


def known(loom: Loom, told: Told) -> None:
    for item in loom.ramify(n=2, stream=True, max_tokens=3, seed=4):
        for branch, tokens in enumerate(item["tokens"]):
            told[branch] = tokens


GROWING = {"grow": grown, "stream": streamed, "ramify": known}
EDITS: dict[str, Callable[[Loom], object]] = {
    "split": lambda loom: loom.children[0].split(1),
    "clip": lambda loom: loom.children[0].clip(1),
    "remove": lambda loom: loom.children[0].remove(),
    "to_leaf": lambda loom: loom.to_leaf(),
    "adopt": lambda loom: loom.children[0].add_child(loom.children[1]),
    "tokens": lambda loom: setattr(loom.children[0], "tokens", [5, 6, 7]),
    "add": lambda loom: loom.children[0].add([8, 9]),
}


# The functions by which a growing call changes the tree.
TELLING = ("delta", "_end", "finish", "_attach", "abandon", "_finish_all")


@pytest.fixture(autouse=True)
def quick() -> None:
    quick_collections()


def shape(loom: Loom) -> list[tuple[Any, ...]]:
    """The tree as it is saved, without ids."""
    index = {node.id: place for place, node in enumerate(loom.walk())}
    return [
        (
            None if node.parent is None else index[node.parent.id],
            node.tokens,
            node.text,
            len(node.logprobs),
            len(node.entropies),
            node.lineage,
            node.terminal,
        )
        for node in loom.walk()
    ]


def check(loom: Loom, file: Path) -> None:
    """Every node is whole, the saved tree is read back whole, and the loom grows on."""
    for node in loom.walk():
        assert len(node.logprobs) in (0, len(node.tokens))
        assert len(node.entropies) == len(node.logprobs)
        assert all(child.parent is node for child in node.children)
        assert node.text == loom.lm.text.decode(node.tokens, first=node is loom)  # type: ignore[union-attr]
    loom.save(file)
    second = Loom.open(file, loom.lm)
    assert second.dropped == ()
    assert shape(second) == shape(loom)


@pytest.mark.parametrize(
    ("name", "everywhere"),
    [("grow", False), ("stream", False)]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in GROWING],
)
def test_an_event_is_applied_whole_or_not_at_all(
    name: str, everywhere: bool, lm: weft.LM, tmp_path: Path
) -> None:
    act, text = GROWING[name], Told()
    with Loom(lm, "Use 4 9 10 13 to make 24.") as loom:
        act(loom, text)  # reads the prompt: what is counted below is what comes each time
    text.clear()
    with Loom(lm, "Use 4 9 10 13 to make 24.") as loom:
        with interrupted(PLACES) as observed:
            act(loom, text)
        full = [child.tokens for child in loom.children]
    for at in range(len(observed)) if everywhere else between_lines(observed, TELLING):
        text.clear()
        with Loom(lm, "Use 4 9 10 13 to make 24.") as loom:
            with pytest.raises(KeyboardInterrupt), interrupted(PLACES, at):
                act(loom, text)
            check(loom, tmp_path / "x.loom.json")
            new = {child.lineage[0]: child for child in loom.children}
            assert len(new) == len(loom.children)
            for branch, child in new.items():
                assert child.tokens == full[branch][: len(child.tokens)]
                assert child.finish_reason in ("interrupted", "cancelled", "length")
            for branch, tokens in text.items():
                assert new[branch].tokens[: len(tokens)] == tokens
            if name == "grow":
                assert len(new) in (0, 2)
            # Nothing goes on that nobody asks for.
            lm.drive([])
            loom.next(1)
            assert lm.scheduler.is_idle
    lm.tree.check()


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_edit_is_done_whole_or_not_at_all(
    name: str, everywhere: bool, lm: weft.LM, tmp_path: Path
) -> None:
    def made() -> Loom:
        loom = Loom(lm, [1, 2, 3])
        for tokens in ([10, 11, 12], [20, 21]):
            child: Heddle = loom.add(tokens)
            child.logprobs, child.entropies = [-1.0] * len(tokens), [1.0] * len(tokens)
            child.add([30])
        return loom

    loom = made()
    before = shape(loom)
    with interrupted(PLACES) as observed:
        EDITS[name](loom)
    after = shape(loom)
    assert before != after
    for at in range(0, len(observed), 1 if everywhere else 7):
        loom = made()
        with pytest.raises(KeyboardInterrupt), interrupted(PLACES, at):
            EDITS[name](loom)
        check(loom, tmp_path / "x.loom.json")
        assert shape(loom) in (before, after)
    lm.tree.check()
