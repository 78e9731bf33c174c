"""Train the embedded model with GRPO on sums in a wording that it does not know: "Add 3 and 4."

python -m recipe.train_grpo                            20 steps, three minutes of one CPU core
python -m recipe.train_grpo --steps 2 --prompts 2      seconds

Needs TRL (pip install trl datasets). The rollouts of each prompt are a tree that Weft grows over
the model object in training. The reward is 1 if the last number of the answer is the sum. Each step
also compares the log-probabilities of the rollouts with those that the trainer computes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft import rollouts

TINY = Path(__file__).parents[1] / "src/weft/data/tiny"


@dataclass(slots=True)
class Report:
    """Results of a run, one value per step.

    rewards: mean reward of the rollouts.
    differences: largest difference of a log-probability from the trainer's own, in nats.
    """

    rewards: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)


def problem(rng: Random) -> dict[str, Any]:
    """Return a prompt and its answer."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return {"prompt": [{"role": "user", "content": f"Add {a} and {b}."}], "answer": a + b}


def reward(completions: Sequence[Any], answer: Sequence[int], **_: Any) -> list[float]:
    """Return 1 for each completion whose last number is the answer, and 0 for the others."""
    texts = [completion[0]["content"] for completion in completions]
    last = [re.findall(r"\d+", text)[-1:] for text in texts]
    return [float(number == [str(right)]) for number, right in zip(last, answer, strict=True)]


def trainer_logprobs(trainer: Any, columns: dict[str, list[Any]], row: int) -> torch.Tensor:
    """Return the log-probabilities of a completion as the trainer's loss computes them."""
    prompt, completion = columns["prompt_ids"][row], columns["completion_ids"][row]
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        result = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(completion)
        )
    logprobs: torch.Tensor = result[0][0]
    return logprobs


def train(
    *, n_steps: int = 20, n_prompts: int = 4, n: int = 8, lr: float = 1e-4, seed: int = 0
) -> Report:
    """Train for some steps and return the report.

    Args:
        n_prompts: prompts of a step.
        n: rollouts of a prompt.
        lr: learning rate.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rng, report = Random(seed), Report()
    grow = rollouts.trl(branch_at=[0, 4])

    def checked(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns = grow(prompts, trainer)
        pairs = [
            (torch.tensor(logprobs), trainer_logprobs(trainer, columns, row))
            for row, logprobs in enumerate(columns["logprobs"])
        ]
        report.differences.append(max(float((a - b).abs().max()) for a, b in pairs))
        return columns

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            reward_funcs=reward,
            rollout_func=checked,
            train_dataset=Dataset.from_list([problem(rng) for _ in range(n_steps * n_prompts)]),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=n_steps,
                per_device_train_batch_size=n_prompts * n,
                num_generations=n,
                max_completion_length=32,
                temperature=1.5,
                learning_rate=lr,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                seed=seed,
            ),
        )
        trainer.train()
    report.rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = train(
        n_steps=args.steps, n_prompts=args.prompts, n=args.rollouts, lr=args.lr, seed=args.seed
    )
    pairs = zip(report.rewards, report.differences, strict=True)
    for step, (mean, difference) in enumerate(pairs):
        print(f"step {step:2}  reward {mean:.2f}  largest difference {difference:.0e} nats")


if __name__ == "__main__":
    main()
