"""Laws of `rollouts.grow`: shapes of trees, log-probabilities, limits and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from shallow import shallow
from weft import Loom, rollouts
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import probabilities
from weft._core.sched.work import Extend, Logits
from weft.errors import ConfigError, ContextOverflow

PROMPTS: list[Any] = ["What is 37 + 58?", "Tell me a story about a fox.", [5, 9, 70]]
SHAPES: list[Any] = ["entropy", "steps", [0], [0, 4], [3, 7], [0, 2, 5]]


@pytest.fixture(scope="module")
def shared() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.fixture
def lm(shared: weft.LM) -> Iterator[weft.LM]:
    lm = weft.LM(shared.engine, shared.text)
    yield lm
    lm.driver.close()


def plain_logits(engine_lm: weft.LM, ids: list[int], n_last: int) -> list[Any]:
    """Return the logits before each of the last tokens, from one forward without stored KV."""
    lm = weft.LM(engine_lm.engine, engine_lm.text)
    wants = tuple(Logits(depth) for depth in range(len(ids) - n_last, len(ids)))
    tickets = lm.submit([Extend(lm.place(ids[:-1]), (), wants)])
    lm.drive(tickets)
    rows: list[Any] = tickets[0].result()
    lm.driver.close()
    return rows


@pytest.mark.parametrize("branch_at", SHAPES, ids=str)
@pytest.mark.parametrize(("n", "width"), [(1, None), (5, None), (8, 3)])
def test_each_tree_has_n_rollouts_within_the_limit(
    lm: weft.LM, branch_at: Any, n: int, width: int | None
) -> None:
    trees = rollouts.grow(lm, PROMPTS, n, branch_at=branch_at, width=width, max_tokens=12, seed=3)
    for tree in trees:
        assert len(tree.leaves) == len(tree.completions) == len(tree.texts) == n
        for leaf, ids in zip(tree.leaves, tree.completions, strict=True):
            assert 1 <= len(ids) <= 12
            is_ended = ids[-1] in lm.text.stop_ids
            assert leaf.finish_reason == ("stop" if is_ended else "length")
            assert is_ended or len(ids) == 12
            assert not set(ids[:-1]) & lm.text.stop_ids
    stats = lm.stats()
    assert stats.decoded == sum(tree.n_generated for tree in trees)
    # At a branch point the last token is run once more, for its logits.
    inner = [part for tree in trees for part in tree.segments() if part.children]
    assert stats.recomputed <= len(inner)


@pytest.mark.parametrize("branch_at", ["entropy", "steps", [0, 3, 6]], ids=str)
def test_logprobs_equal_those_of_a_plain_forward(lm: weft.LM, branch_at: Any) -> None:
    sampling: dict[str, Any] = {"temperature": 1.7, "top_p": 0.9, "logit_bias": {9: 2.0}}
    trees = rollouts.grow(
        lm, PROMPTS, 4, branch_at=branch_at, max_tokens=12, seed=1, top_k=50, **sampling
    )
    params = SamplingParams(top_k=50, **sampling)
    records = rollouts.flatten(trees, [[0.0] * 4] * 3)
    for record in records:
        completion = record["completion_ids"]
        rows = plain_logits(lm, record["prompt_ids"] + completion, len(completion))
        pairs = list(zip(rows, completion, strict=True))
        policy = [np.log(probabilities(row, params)[token]) for row, token in pairs]
        raw = [np.log(probabilities(row, SamplingParams())[token]) for row, token in pairs]
        assert record["policy_logprobs"] == pytest.approx(policy, abs=1e-4)
        assert record["logprobs"] == pytest.approx(raw, abs=1e-4)


def test_plain_policy_has_equal_logprobs(lm: weft.LM) -> None:
    (tree,) = rollouts.grow(lm, PROMPTS[:1], 3, max_tokens=8, seed=1)
    for segment in tree.segments():
        assert segment.policy_logprobs == pytest.approx(segment.logprobs, abs=1e-5)


def test_depths_are_the_branch_points(lm: weft.LM) -> None:
    (tree,) = rollouts.grow(lm, [PROMPTS[1]], 8, branch_at=[2, 5], max_tokens=9, seed=1)
    assert [(part.start, len(part.children)) for part in tree.leaves[0].path] == [
        (0, 3),  # 8 rollouts at two points: three paths, then 3, 3 and 2
        (2, 3),
        (5, 0),
    ]
    assert tree.n_generated == 2 + 3 * 3 + 8 * 4


def test_steps_branch_after_line_ends(lm: weft.LM) -> None:
    newline = lm.text.encode("\n")[-1]
    (tree,) = rollouts.grow(
        lm,
        [PROMPTS[1]],
        8,
        branch_at="steps",
        max_tokens=40,
        seed=1,
        logit_bias={newline: 6.0, **dict.fromkeys(lm.text.stop_ids, -np.inf)},
    )
    inner = [segment for segment in tree.segments() if segment.children]
    assert len(inner) >= 4
    for segment in inner:
        text = lm.text.decode(segment.tokens)
        assert text.endswith("\n")
        assert text.strip()
        assert "\n" not in text.strip()


def test_entropy_branches_before_the_token_of_highest_entropy(lm: weft.LM) -> None:
    (tree,) = rollouts.grow(lm, [PROMPTS[1]], 3, branch_at="entropy", max_tokens=12, seed=2)
    (upper,) = [segment for segment in tree.segments() if segment.children]
    lower, new = upper.children
    (other,) = [segment for segment in tree.root.children if segment is not upper]
    first = [*upper.entropies[1:], *lower.entropies, *other.entropies[1:]]
    assert lower.entropies[0] == max(first)
    assert new.start == lower.start == upper.end


def test_paths_that_end_early_are_replaced(lm: weft.LM) -> None:
    end = min(lm.text.stop_ids)
    for branch_at in SHAPES:
        (tree,) = rollouts.grow(
            lm, [PROMPTS[0]], 4, branch_at=branch_at, max_tokens=12, logit_bias={end: np.inf}
        )
        assert tree.completions == [[end]] * 4
        assert tree.texts == [""] * 4


def test_seed_repeats_trees(lm: weft.LM) -> None:
    first, second, other = (
        [tree.completions for tree in rollouts.grow(lm, PROMPTS, 4, max_tokens=8, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_full_context_ends_a_rollout(shared: weft.LM) -> None:
    lm = weft.LM(shared.engine, shared.text, n_ctx=6)
    never_ends = dict.fromkeys(lm.text.stop_ids, -np.inf)
    (tree,) = rollouts.grow(
        lm, [[5, 9, 70]], 2, max_tokens=12, branch_at=[0, 1], logit_bias=never_ends
    )
    assert {leaf.end for leaf in tree.leaves} == {3}
    with pytest.raises(ContextOverflow):
        rollouts.grow(lm, [[5, 9, 70, 5, 9, 70]], 2)
    lm.driver.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": "text"}, "a list of prompts"),
        ({"n": 0}, "n is 0"),
        ({"width": 1}, "width is 1"),
        ({"branch_at": "lines"}, "branch_at is 'lines'"),
        ({"branch_at": []}, "branch_at is"),
        ({"branch_at": [4, 12]}, "12; allowed is an integer from 0 to 11"),
        ({"temperature": 0}, "must be above 0"),
        ({"stop": "."}, "stop has no effect on rollouts"),
        ({"presence_penalty": 0.5}, "presence_penalty has no effect"),
        ({"temprature": 1}, "temperature"),
    ],
)
def test_wrong_arguments_raise(lm: weft.LM, changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": PROMPTS, "n": 2, "max_tokens": 12, **changed}
    with pytest.raises(ConfigError, match=message):
        rollouts.grow(lm, **arguments)


def test_no_prompts_return_no_trees(lm: weft.LM) -> None:
    assert rollouts.grow(lm, []) == []


def test_rollouts_share_kv_with_other_callers(lm: weft.LM) -> None:
    loom = Loom(lm, PROMPTS[0])
    loom.next()
    before = lm.stats().prefilled
    rollouts.grow(lm, PROMPTS[:1], 2, max_tokens=4, seed=1)
    assert lm.stats().prefilled - before <= 1
