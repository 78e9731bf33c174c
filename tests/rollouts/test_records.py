"""Laws of `rollouts.flatten`: advantages, and marks of shared segments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from statistics import fmean, stdev

import pytest

import weft
from shallow import shallow
from weft import rollouts
from weft.errors import ConfigError

REWARDS = [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def trees() -> Iterator[list[rollouts.Tree]]:
    with weft.load(shallow(), engine="numpy") as lm:
        never_ends = dict.fromkeys(lm.text.stop_ids, -math.inf)
        yield rollouts.grow(
            lm,
            ["Tell me a story.", "What is 3 + 4?"],
            4,
            branch_at=[0, 3],
            max_tokens=8,
            logit_bias=never_ends,
        )


def test_records_have_the_tokens_of_their_leaf(trees: list[rollouts.Tree]) -> None:
    records = rollouts.flatten(trees, REWARDS)
    assert [record["group"] for record in records] == [0] * 4 + [1] * 4
    assert [record["reward"] for record in records] == [*REWARDS[0], *REWARDS[1]]
    completions = [completion for tree in trees for completion in tree.completions]
    for record, completion in zip(records, completions, strict=True):
        assert record["prompt_ids"] == trees[record["group"]].prompt_ids
        assert record["completion_ids"] == completion
        lists = (record["policy_logprobs"], record["logprobs"], record["advantages"])
        assert {len(values) for values in lists} == {len(completion)}
    assert json.loads(json.dumps(records)) == records


def test_group_advantages_are_those_of_grpo(trees: list[rollouts.Tree]) -> None:
    scale = stdev(REWARDS[0]) + 1e-4
    for record in rollouts.flatten(trees, REWARDS):
        expected = (record["reward"] - fmean(REWARDS[0])) / scale if not record["group"] else 0.0
        assert record["advantages"] == pytest.approx([expected] * 8)


def test_sibling_advantages_compare_values_of_segments(trees: list[rollouts.Tree]) -> None:
    records = rollouts.flatten(trees, REWARDS, advantages="siblings")[:4]
    scale = stdev(REWARDS[0]) + 1e-4
    # Two segments after the prompt, with two leaves each.
    values = {0: 0.5, 1: 0.25}
    for number, record in enumerate(records):
        shared, own = record["segments"]
        value = values[number // 2]
        assert (shared["n_leaves"], own["n_leaves"]) == (2, 1)
        assert shared["value"] == value
        assert shared["advantage"] == pytest.approx((value - 0.375) / scale)
        assert own["advantage"] == pytest.approx((record["reward"] - value) / scale)
        parts = (shared, own)
        expected = [part["advantage"] for part in parts for _ in range(part["start"], part["end"])]
        assert record["advantages"] == expected


def test_shared_segments_have_one_id(trees: list[rollouts.Tree]) -> None:
    records = rollouts.flatten(trees, REWARDS)
    first, second, third, _ = (record["segments"] for record in records[:4])
    assert first[0] == second[0]
    assert first[0]["id"] != third[0]["id"]
    unique = {
        part["id"]: part["end"] - part["start"] for r in records[:4] for part in r["segments"]
    }
    assert sum(unique.values()) == trees[0].n_generated


def test_one_rollout_has_advantage_0() -> None:
    with weft.load(shallow(), engine="numpy") as lm:
        trees = rollouts.grow(lm, [[5, 9]], 1, max_tokens=3, seed=1)
    (record,) = rollouts.flatten(trees, [[2.0]])
    assert set(record["advantages"]) == {0.0}


def test_wrong_rewards_raise(trees: list[rollouts.Tree]) -> None:
    with pytest.raises(ConfigError, match="1 lists for 2 trees"):
        rollouts.flatten(trees, REWARDS[:1])
    with pytest.raises(ConfigError, match="tree 1 has 4 rollouts, but 2 rewards"):
        rollouts.flatten(trees, [REWARDS[0], [1.0, 2.0]])
    with pytest.raises(ConfigError, match="a reward is nan"):
        rollouts.flatten(trees, [REWARDS[0], [float("nan")] * 4])
    with pytest.raises(ConfigError, match="advantages is 'both'"):
        rollouts.flatten(trees, REWARDS, advantages="both")  # type: ignore[arg-type]


def test_records_are_rows_of_a_dataset(trees: list[rollouts.Tree]) -> None:
    datasets = pytest.importorskip("datasets")
    records = rollouts.flatten(trees, REWARDS)
    dataset = datasets.Dataset.from_list(records)
    assert dataset.to_list() == records
