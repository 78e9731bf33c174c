"""Branches of one call are in branch order, independent of their ends and of edits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import weft
from shallow import shallow
from weft.loom.pending_branch import SiblingOrder


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.mark.parametrize("seed", range(20))
def test_children_of_a_call_are_in_the_order_of_a_full_scan(lm: weft.LM, seed: int) -> None:
    rng = random.Random(seed)
    node = weft.Loom(lm, "x")
    others = [node.add_text_child(f" {i}") for i in range(rng.randrange(4))]
    siblings, there = SiblingOrder(node), dict[int, object]()
    expected = list(node.children)
    for number in rng.sample(range(60), 60):
        child = node._child([number])
        later = [there[each] for each in sorted(there) if each > number]
        places = [i for i, each in enumerate(expected) if any(each is one for one in later)]
        expected.insert(min(places, default=len(expected)), child)
        siblings.insert(number, child)
        there[number] = child
        if rng.random() < 0.2 and others:  # one caller clips a node, another adds one
            gone = others.pop()
            node._children[:] = [each for each in node._children if each is not gone]
            expected = [each for each in expected if each is not gone]
        if rng.random() < 0.1:
            gone_number = rng.choice(sorted(there))
            gone_child = there.pop(gone_number)
            node._children[:] = [each for each in node._children if each is not gone_child]
            expected = [each for each in expected if each is not gone_child]
        if rng.random() < 0.2:
            others.append(node.add_text_child(" new"))
            expected.append(others[-1])
        assert [id(each) for each in node.children] == [id(each) for each in expected]
