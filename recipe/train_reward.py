"""Train a process reward model on Game-of-24 steps: can the numbers that are left still make 24?

python -m recipe.train_reward --out reward                    three minutes of one CPU core
python -m recipe.train_reward --out trial --solutions 100     seconds

The base model is the embedded one and stays as it is. Only a head of two layers is trained, at the
line end after each step. So the files have the form of Qwen2.5-Math-PRM: `score.0` and `score.2`.
TRL's PRMTrainer would train all weights with a head of one layer, for which a CPU takes hours; TRL
1.16 has it no more. The 100 puzzles of the benchmark are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, AutoTokenizer

from .corpus.game24 import Move, ask, can_reach, holdout24, moves, puzzles

TINY = Path(__file__).parents[1] / "src/weft/data/tiny"
IGNORED = -100
BATCH = 25


@dataclass(frozen=True, slots=True)
class Solution:
    """A puzzle with steps that are right or wrong.

    labels: per step, True if the numbers left can make 24.
    """

    prompt: str
    steps: list[str]
    labels: list[bool]


def solution(rng: Random) -> Solution:
    """Return random steps of a training puzzle, up to the first wrong one.

    About two of three steps keep 24 in reach.
    """
    numbers = _puzzle(rng)
    shown = list(numbers)
    rng.shuffle(shown)
    steps, labels = list[str](), list[bool]()
    is_right = True
    while is_right and len(numbers) > 1:
        options = moves(numbers)
        if rng.random() < 0.6:
            options = tuple(move for move in options if can_reach(move.rest, 24))
        move = rng.choice(options)
        is_right = can_reach(move.rest, 24)
        line = str(move)
        if rng.random() < 0.1:
            line, is_right = _miscalculated(move, rng), False
        steps.append(line)
        labels.append(is_right)
        numbers = move.rest
    return Solution(ask(shown), steps, labels)


def tokens_of(tokenizer: Any, example: Solution) -> tuple[list[int], list[int]]:
    """Return the token ids, and a label per token: 0 or 1 at the end of a step, else `IGNORED`."""
    chat = [{"role": "user", "content": example.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    labels = [IGNORED] * len(ids)
    for step, label in zip(example.steps, example.labels, strict=True):
        own = [
            t for text in (step, "\n") for t in tokenizer(text, add_special_tokens=False).input_ids
        ]
        ids += own
        labels += [IGNORED] * (len(own) - 1) + [int(label)]
    return ids, labels


def train(out: Path, *, n_solutions: int, epochs: int, seed: int) -> float:
    """Train and save the model; return the share of right verdicts on a tenth of the steps."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForTokenClassification.from_pretrained(
        TINY, num_labels=2, dtype=torch.float32
    ).eval()
    rng = Random(seed)
    rows = [tokens_of(tokenizer, solution(rng)) for _ in range(n_solutions)]
    states, labels = states_at_steps(model.model, rows)
    n_kept = len(labels) // 10
    mean, scale = states.mean(0), states.std(0) + 1e-6
    head = fit((states[n_kept:] - mean) / scale, labels[n_kept:], epochs)
    with torch.no_grad():  # the first layer also takes the normalisation
        first = head[0]
        first.bias -= first.weight @ (mean / scale)
        first.weight /= scale
        right = (head(states[:n_kept]).argmax(-1) == labels[:n_kept]).float().mean()
    model.score = head
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["architectures"] = ["LlamaForProcessRewardModel"]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return float(right)


@torch.no_grad()
def states_at_steps(
    base: Any, rows: Sequence[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the base model's final states at the ends of steps, [N, E], and their labels, [N]."""
    states, labels = list[torch.Tensor](), list[torch.Tensor]()
    by_length = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(rows), BATCH):
        ids, known = _padded(by_length[start : start + BATCH])
        at_steps = known != IGNORED
        states.append(base(input_ids=ids).last_hidden_state[at_steps])
        labels.append(known[at_steps])
    order = torch.randperm(sum(map(len, labels)))
    return torch.cat(states)[order], torch.cat(labels)[order]


def fit(states: torch.Tensor, labels: torch.Tensor, epochs: int) -> nn.Sequential:
    """Return a head of two layers that predicts labels [N] from states [N, E]."""
    size = states.shape[1]
    head = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 2))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.3)
    steps = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs)
    for _ in range(epochs):
        for some in torch.randperm(len(labels)).split(128):
            loss = nn.functional.cross_entropy(head(states[some]), labels[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        steps.step()
    return head


def _puzzle(rng: Random) -> tuple[int, ...]:
    while (numbers := rng.choice(puzzles())) in holdout24():
        pass
    return numbers


def _miscalculated(move: Move, rng: Random) -> str:
    wrong = move.result + rng.choice((-2, -1, 1, 2))
    rest = tuple(sorted([*_without(move.rest, move.result), wrong]))
    return str(move._replace(result=wrong, rest=rest))


def _without(numbers: Sequence[int], one: int) -> list[int]:
    left = list(numbers)
    left.remove(one)
    return left


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels padded at the right, where no token before sees the padding."""
    longest = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (longest - len(ids)) for ids, _ in rows]
    labels = [labels + [IGNORED] * (longest - len(labels)) for _, labels in rows]
    return torch.tensor(ids), torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a process reward model on Game of 24")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--solutions", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    right = train(given.out, n_solutions=given.solutions, epochs=given.epochs, seed=given.seed)
    print(f"right verdicts on steps that were kept back: {right:.1%}")


if __name__ == "__main__":
    main()
