"""The GRPO recipe: TRL trains the embedded model on rollouts. `make test-plugins` runs it."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-plugins has it")

# Transformers and TRL warn of their own deprecations.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def test_logprobs_equal_those_of_the_trainer_at_each_step() -> None:
    from recipe.train_grpo import train

    report = train(n_steps=2, n_prompts=2, n=4)
    assert len(report.rewards) == len(report.differences) == 2
    assert max(report.differences) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three minutes of CPU time
def test_reward_rises_in_20_steps() -> None:
    from recipe.train_grpo import train

    report = train()
    assert max(report.differences) < 1e-3
    assert sum(report.rewards[-5:]) > sum(report.rewards[:5]) + 1
