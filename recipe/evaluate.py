"""Measure a trained model: word problems, the 100 held-out puzzles, verdicts.

python -m recipe.evaluate src/weft/data/tiny            all metrics, minutes on a GPU
python -m recipe.evaluate src/weft/data/tiny --quick    a few of each, on a CPU
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .corpus.game24 import ask, holdout24, solves, value
from .corpus.word_problems import large_problem, word_problem

# Seeds no training shard uses.
WORD_SEED, LARGE_SEED, VALUE_SEED = 10**9, 77, 5
BATCH = 1600


@dataclass(frozen=True, slots=True)
class Effort:
    """How many of each to ask."""

    problems: int
    voted: int
    votes: int
    puzzles: int
    tries: int
    verdicts: int


FULL = Effort(problems=400, voted=100, votes=16, puzzles=100, tries=64, verdicts=600)
QUICK = Effort(problems=20, voted=4, votes=4, puzzles=10, tries=2, verdicts=40)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model and its tokenizer."""

    model: Any
    tokenizer: Any

    @staticmethod
    def load(folder: Path) -> Model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        return Model(model, AutoTokenizer.from_pretrained(folder, padding_side="left"))

    def complete(self, asks: Sequence[str], max_tokens: int, **sampling: Any) -> list[str]:
        """Return one answer to each question; greedy unless `sampling` says otherwise."""
        answers = []
        for start in range(0, len(asks), BATCH):
            answers += self._batch(asks[start : start + BATCH], max_tokens, sampling)
        return answers

    @torch.inference_mode()
    def _batch(self, asks: Sequence[str], max_tokens: int, sampling: dict[str, Any]) -> list[str]:
        chats = [[{"role": "user", "content": text}] for text in asks]
        inputs = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        inputs = {key: inputs[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        options = {"do_sample": bool(sampling), **({"top_k": 0, **sampling} if sampling else {})}
        rows = self.model.generate(**inputs, max_new_tokens=max_tokens, **options)
        answers = rows[:, inputs["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(answers, skip_special_tokens=True))


def evaluate(folder: Path, effort: Effort) -> dict[str, float]:
    """Return shares of right answers, each between 0 and 1."""
    torch.manual_seed(0)
    model = Model.load(folder)
    return {
        **_word_problems(model, effort),
        **_large_problems(model, effort),
        **_puzzles(model, effort),
        **_verdicts(model, effort),
    }


def final_answer(text: str) -> int | None:
    """Return the last number given as the answer, or None."""
    numbers = re.findall(r"The answer is (-?\d+)", text)
    return int(numbers[-1]) if numbers else None


def _word_problems(model: Model, effort: Effort) -> dict[str, float]:
    rng = Random(WORD_SEED)
    examples = [word_problem(rng) for _ in range(effort.problems)]
    asks = [example.user or "" for example in examples]
    right = [example.answer or 0 for example in examples]
    greedy = [final_answer(text) for text in model.complete(asks, 260)]
    n, sampling = effort.voted, {"temperature": 0.8, "min_p": 0.05}
    tally = _vote(model, asks[:n], right[:n], effort.votes, 260, sampling)
    return {
        "word_greedy": _share([a == b for a, b in zip(greedy, right, strict=True)]),
        **{f"word_{name}": share for name, share in tally.items()},
    }


def _large_problems(model: Model, effort: Effort) -> dict[str, float]:
    rng = Random(LARGE_SEED)
    problems = [large_problem(rng) for _ in range(effort.voted)]
    asks, right = [p.text for p in problems], [p.answer for p in problems]
    tally = _vote(model, asks, right, effort.votes, 120, {"temperature": 0.8})
    return {f"big_{name}": share for name, share in tally.items()}


def _vote(
    model: Model,
    asks: list[str],
    right: list[int],
    votes: int,
    max_tokens: int,
    sampling: dict[str, float],
) -> dict[str, float]:
    """Return how often one sample, the majority of `votes`, and any of them are right."""
    texts = model.complete([text for text in asks for _ in range(votes)], max_tokens, **sampling)
    got = [final_answer(text) for text in texts]
    groups = [got[i * votes : (i + 1) * votes] for i in range(len(asks))]
    single = [answer == want for group, want in zip(groups, right, strict=True) for answer in group]
    majority = [_majority(group) == want for group, want in zip(groups, right, strict=True)]
    some = [want in group for group, want in zip(groups, right, strict=True)]
    return {
        "sample": _share(single),
        f"maj{votes}": _share(majority),
        f"pass{votes}": _share(some),
    }


def _puzzles(model: Model, effort: Effort) -> dict[str, float]:
    puzzles = holdout24()[:: max(1, len(holdout24()) // effort.puzzles)]
    asks, tries = [ask(numbers) for numbers in puzzles], effort.tries
    greedy = model.complete(asks, 120)
    texts = model.complete([a for a in asks for _ in range(tries)], 120, temperature=0.8)
    solved = [solves(text, puzzles[i // tries]) for i, text in enumerate(texts)]
    per_puzzle = [any(solved[i : i + tries]) for i in range(0, len(solved), tries)]
    first = [solves(text, numbers) for text, numbers in zip(greedy, puzzles, strict=True)]
    return {
        "make24_greedy": _share(first),
        "make24_sample": _share(solved),
        f"make24_pass{tries}": _share(per_puzzle),
    }


def _verdicts(model: Model, effort: Effort) -> dict[str, float]:
    rng = Random(VALUE_SEED)
    examples = [value(rng) for _ in range(effort.verdicts)]
    texts = model.complete([example.user or "" for example in examples], 6)
    pairs = zip(texts, examples, strict=True)
    return {"value_acc": _share([text.strip() == example.assistant for text, example in pairs])}


def _majority(answers: list[int | None]) -> int | None:
    counts = Counter(answer for answer in answers if answer is not None)
    return counts.most_common(1)[0][0] if counts else None


def _share(right: list[bool]) -> float:
    return sum(right) / len(right)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure a trained model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few of each, for a CPU")
    given = parser.parse_args(arguments)
    print(json.dumps(evaluate(given.folder, QUICK if given.quick else FULL), indent=1))


if __name__ == "__main__":
    main()
