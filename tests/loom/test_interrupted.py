"""Ctrl-C at any bytecode of a growing call or an edit leaves a consistent tree."""

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

Tokens = dict[int, list[int]]  # tokens by branch, as far as the caller received them


def grown(loom: Loom, tokens_of: Tokens) -> None:
    loom.grow(2, **OPTIONS)


def streamed(loom: Loom, tokens_of: Tokens) -> None:
    for delta in loom.stream(2, **OPTIONS):
        tokens_of.setdefault(delta.branch, []).extend(delta.token_ids)


def known(loom: Loom, tokens_of: Tokens) -> None:
    for item in loom.ramify(n=2, stream=True, max_tokens=3, seed=4):
        for branch, tokens in enumerate(item["tokens"]):
            tokens_of[branch] = tokens


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
    """Every node is consistent, the saved tree is read back equal, and the loom can grow."""
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
def test_interrupted_growth_applies_each_event_completely_or_not_at_all(
    name: str, everywhere: bool, lm: weft.LM, tmp_path: Path
) -> None:
    act, text = GROWING[name], Tokens()
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
            # No work continues without a caller.
            lm.drive([])
            loom.next(1)
            assert lm.scheduler.is_idle
    lm.tree.check()


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interrupted_edit_is_applied_completely_or_not_at_all(
    name: str, everywhere: bool, lm: weft.LM, tmp_path: Path
) -> None:
    def new_loom() -> Loom:
        loom = Loom(lm, [1, 2, 3])
        for tokens in ([10, 11, 12], [20, 21]):
            child: Heddle = loom.add(tokens)
            child.logprobs, child.entropies = [-1.0] * len(tokens), [1.0] * len(tokens)
            child.add([30])
        return loom

    loom = new_loom()
    before = shape(loom)
    with interrupted(PLACES) as observed:
        EDITS[name](loom)
    after = shape(loom)
    assert before != after
    for at in range(0, len(observed), 1 if everywhere else 7):
        loom = new_loom()
        with pytest.raises(KeyboardInterrupt), interrupted(PLACES, at):
            EDITS[name](loom)
        check(loom, tmp_path / "x.loom.json")
        assert shape(loom) in (before, after)
    lm.tree.check()
