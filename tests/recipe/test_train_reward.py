"""The recipe of the process reward model: its steps and labels, and the files it saves."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from recipe.corpus.game24 import ask, can_reach, holdout24
from weft.search import RewardModel

pytestmark = pytest.mark.torch


def test_labels_are_true_while_24_is_in_reach() -> None:
    from recipe.train_reward import solution

    rng, n_wrong = Random(1), 0
    excluded = {ask(numbers) for numbers in holdout24()}
    for _ in range(300):
        example = solution(rng)
        assert example.prompt not in excluded
        assert all(example.labels[:-1])  # a wrong step is the last one
        for step, is_right in zip(example.steps, example.labels, strict=True):
            left = tuple(map(int, step.split("left: ")[1].rstrip(")").split()))
            assert not is_right or can_reach(left, 24)
        n_wrong += not example.labels[-1]
    assert 60 < n_wrong < 260


@pytest.mark.programs
def test_trained_model_scores_steps(tmp_path: Path) -> None:
    from recipe.train_reward import train

    assert train(tmp_path, n_solutions=60, epochs=2, seed=0) > 0.3
    reward = RewardModel.load(tmp_path, chat=True)
    assert reward.kind == "steps"
    lines = "13 - 9 = 4 (left: 4 4 10)\n10 - 4 = 6 (left: 4 6)"
    (score,) = reward.score("Use 4 9 10 13 to make 24.", [lines])
    assert 0 < score < 1
    reward.close()
