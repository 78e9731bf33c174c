"""Rollouts of a real model, against its logits from Transformers."""

from __future__ import annotations

from typing import Any

import pytest

from models.conftest import Load
from weft import rollouts

PROMPTS = ["What is 17 + 25? Think in steps.", "Name three colors, one a line."]


@pytest.mark.parametrize("branch_at", ["entropy", "steps", [0, 6]], ids=str)
@pytest.mark.parametrize("name", ["smollm2-torch", "smollm2-numpy"])
def test_policy_logprobs_equal_those_of_transformers(
    name: str, branch_at: Any, load_real: Load, transformers_model: Any
) -> None:
    import torch

    trees = rollouts.grow(
        load_real(name), PROMPTS, 4, branch_at=branch_at, max_tokens=16, temperature=1.3, seed=1
    )
    for record in rollouts.flatten(trees, [[0.0] * 4] * 2):
        prompt, completion = record["prompt_ids"], record["completion_ids"]
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([prompt + completion])).logits[0]
        at = torch.tensor(completion)[:, None]
        for t, logprobs in ((1.3, record["policy_logprobs"]), (1.0, record["logprobs"])):
            rows = (logits[len(prompt) - 1 : -1] / t).log_softmax(-1)
            assert logprobs == pytest.approx(rows.gather(1, at)[:, 0].tolist(), abs=1e-4)
    assert sum(tree.n_generated for tree in trees) < sum(
        len(completion) for tree in trees for completion in tree.completions
    )
