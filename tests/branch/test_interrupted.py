"""Ctrl-C in the middle of a commit: all its branches have gone on, or none has."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from interrupts import between_lines, interrupted, quick_collections
from shallow import shallow
from weft import Branch, BranchStore, samples

PLACES = ("branch/calls.py", "branch/state.py")
FINISHING = (
    *("run", "_finish", "finish", "advanced", "surprisals", "produced", "moved", "__init__"),
    *("turn", "_claim", "_release"),
)


@pytest.fixture(autouse=True)
def quick() -> None:
    quick_collections()


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interrupted_commit_of_two_branches_changes_both_or_neither(everywhere: bool) -> None:
    with weft.load(shallow(), engine="numpy") as lm:
        store = BranchStore(lm)
        prompt = lm.tokenize(samples.opening)

        def committed_branches() -> list[Branch]:
            first = Branch.create(lm, seed=1, repetition_penalty=1.1)
            first.prefill(prompt)
            branches = [first, first.fork()]
            store.commit([(each, 40) for each in branches])
            return branches

        def state(branches: list[Branch]) -> list[Any]:
            # A token drawn ahead belongs to the state in which it was drawn.
            return [
                (each.tokens, each.save()["accepted"], each.produce().token) for each in branches
            ]

        def commit(branches: list[Branch]) -> None:
            store.commit([(each, 41) for each in branches])

        branches = committed_branches()
        before = state(branches)
        with interrupted(PLACES) as observed:
            commit(branches)
        after = state(branches)
        for at in range(len(observed)) if everywhere else between_lines(observed, FINISHING):
            branches = committed_branches()
            assert state(branches) == before
            with pytest.raises(KeyboardInterrupt), interrupted(PLACES, at):
                commit(branches)
            now = state(branches)
            assert now in (before, after)
            if now == before:
                commit(branches)
            assert state(branches) == after
        lm.tree.check()
