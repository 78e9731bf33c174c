"""Speculative decoding by prompt lookup: `draft="lookup"` and no drafts, in turn in one process.

Tasks, with n = 1, 2 and 4 branches:

  prose   A story, at temperature 0.8.
  JSON    A list of records under a schema, at temperature 0.8.
  code    Accessors of a class after some of them, at temperature 0.3. The text is repetitive.

SmolLM2 writes texts of its own, by `grow` and by `Branch`. A random model of the shape of
Qwen2-0.5B replays these texts, because random weights write no prose. A constraint allows it one
token at each position. It draws each of them from logits; nothing is forced.

Each call starts with an empty tree. So drafts come from the branch itself, its prompt and its
siblings. A round is a call without drafts, one with, and one without. ms is CPU time of one thread
for a token, the median of the rounds. x is the median of the rounds' own ratios, without drafts by
with. plain x is the smallest ratio of the two equal calls of a round, which only other programs
change. tokens/step counts steps with drafts.

must: x is at least 0.97 everywhere, and 1.5 for code.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from common import median, report
from cpu_torch import random_model
from numpy.typing import NDArray

import weft
from weft._core.sampling.params import SamplingParams
from weft._core.sched.work import Run
from weft.constraints.base import Compiler, Constraint, Matcher

NAMES = "width height depth weight color material price stock".split()
CODE = "class Item:\n" + "".join(
    f"    def get_{name}(self):\n        return self._{name}\n\n"
    f"    def set_{name}(self, value):\n        self._{name} = value\n\n"
    for name in NAMES[:4]
)
CODE += f"    def get_{NAMES[4]}"
SCHEMA = {
    "type": "array",
    "minItems": 6,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["fruit", "vegetable", "grain"]},
            "calories": {"type": "integer"},
            "color": {"type": "string", "maxLength": 20},
        },
        "required": ["name", "kind", "calories", "color"],
    },
}
MUST = {"prose": 0.97, "JSON": 0.97, "code": 1.5}
MODELS = ".cache/weft/models/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Replay(Constraint):
    """Allows one token at each position, which is drawn like any other."""

    tokens: tuple[int, ...]

    def compile(self, compiler: Compiler) -> Matcher:
        return ReplayMatcher(self.tokens, 0)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "replay", "tokens": list(self.tokens)}


class ReplayMatcher(Matcher):
    def __init__(self, tokens: tuple[int, ...], at: int) -> None:
        self.tokens, self.at = tokens, at

    def fill(self, bits: NDArray[np.int32], *sets: Set[int]) -> None:
        token = self.tokens[self.at]
        bits[:] = 0
        bits.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        self.at += 1

    def is_allowed(self, token: int) -> bool:
        # Wrong draft tokens must run too, as in a text without constraint.
        return self.at < len(self.tokens)

    @property
    def may_end(self) -> bool:
        return self.at == len(self.tokens)

    @property
    def must_end(self) -> bool:
        return self.may_end

    def clone(self) -> Matcher:
        return ReplayMatcher(self.tokens, self.at)


@dataclass
class Task:
    """A call of `grow`; `texts` are the tokens of its branches by (number of branches, seed)."""

    name: str
    start: Any
    options: dict[str, Any]
    texts: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)  # the tokens of `start`

    def grow(self, lm: weft.LM, n: int, seed: int) -> list[list[int]]:
        """Grow n branches and return their tokens."""
        with weft.Loom(lm, self.start) as loom:
            self.prompt = list(loom.tokens)
            nodes = loom.grow(n=n, seed=seed, **self.options)
            self.texts[n, seed] = [list(node.tokens) for node in nodes]
        return self.texts[n, seed]

    def decode(self, lm: weft.LM, n: int, seed: int) -> list[list[int]]:
        """Decode n branches in lockstep by `Branch` and return their tokens."""
        options = {name: value for name, value in self.options.items() if name != "max_tokens"}
        with weft.Loom(lm, self.start) as loom:
            prompt = list(loom.tokens)
        store = weft.BranchStore(lm)
        with weft.Branch.create(lm, seed=seed, **options) as root:
            root.prefill(prompt)
            branches = live = [root.fork() for _ in range(n)]
            for _ in range(self.options["max_tokens"]):
                live = [branch for branch in live if not branch.produce().is_stop]
                store.commit([(branch, branch.produce().token) for branch in live])
            return [branch.tokens[len(prompt) :] for branch in branches]

    def replay(self, lm: weft.LM, n: int, seed: int) -> list[list[int]]:
        """Generate the same texts with another model."""
        place, runs = lm.place(self.prompt), []
        for number, text in enumerate(self.texts[n, seed]):
            params = SamplingParams(constraint=Replay(tuple(text)))
            runs.append(Run(place.fork(), lm.sampler(params, number), max_tokens=len(text)))
        tickets = lm.submit(runs)
        lm.drive(tickets)
        return [ticket.result().tokens for ticket in tickets]


def tasks(lm: weft.LM, n_tokens: int) -> list[Task]:
    def chat(text: str) -> Any:
        return lm.format_chat([{"role": "user", "content": text}])

    story = chat("Write a long story about a fox who crosses the mountains in winter.")
    records = chat("List six foods as JSON, with name, kind, calories and color.")
    sampled = {"temperature": 0.8, "max_tokens": n_tokens}
    return [
        Task("prose", story, sampled),
        Task("JSON", records, {**sampled, "constraint": SCHEMA}),
        Task("code", lm.text.encode(CODE), {"temperature": 0.3, "max_tokens": n_tokens}),
    ]


def measure(
    lm: weft.LM, job: Callable[[weft.LM, int, int], list[list[int]]], n: int, rounds: int
) -> dict[str, Any]:
    """Run a job without drafts, with, and without again, in turn."""
    drafts = (None, "lookup", None)
    took: list[list[float]] = [[] for _ in drafts]
    n_tokens = n_steps = n_same = 0
    for seed in range(rounds + 1):
        texts = []
        for draft, seconds in zip(drafts, took, strict=True):
            lm.draft = None
            lm.clear_cache()  # twice, because the first call closes the sequences of branches
            lm.clear_cache()
            lm.draft = draft
            before, began = lm.stats(), time.process_time()
            texts.append(job(lm, n, seed))
            if not seed:  # a warm-up
                continue
            n_new = sum(map(len, texts[-1]))
            seconds.append((time.process_time() - began) / n_new)
            if draft is not None:
                n_tokens, n_steps = n_tokens + n_new, n_steps + lm.stats().steps - before.steps
        n_same += bool(seed) and texts[0] == texts[1] == texts[2]
    plain = [(first + last) / 2 for first, last in zip(took[0], took[2], strict=True)]
    ratios = [a / b for a, b in zip(plain, took[1], strict=True)]
    return {
        "n": n,
        "ms": 1e3 * median(plain),
        "ms lookup": 1e3 * median(took[1]),
        "x": median(ratios),
        "least x": min(ratios),
        "plain x": min(min(a / b, b / a) for a, b in zip(took[0], took[2], strict=True)),
        "tokens/step": n_tokens / n_steps,
        "same": f"{n_same}/{rounds}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smollm2", type=Path, default=Path.home() / MODELS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", nargs="+", default=["grow", "Branch"])
    parser.add_argument("--shapes", nargs="*", default=["qwen2"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        with weft.load(options.smollm2, engine="torch", dtype=dtype) as lm:
            each = tasks(lm, options.tokens)
            rows += rows_of(lm, "SmolLM2", dtype, each, options, own=True)
        for shape in options.shapes:
            with tempfile.TemporaryDirectory() as folder:
                random_model(Path(folder), shape, dtype)
                with weft.load(folder, engine="torch", dtype=dtype) as lm:
                    rows += rows_of(lm, shape, dtype, each, options, own=False)
    report("speculative", rows, must=MUST, torch=torch.__version__)


def rows_of(
    lm: weft.LM, name: str, dtype: str, each: list[Task], options: argparse.Namespace, *, own: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model. own: it writes the texts; False: it replays them."""
    for task in each:
        calls = {"grow": task.grow, "Branch": task.decode} if own else {"replay": task.replay}
        for n in options.n:
            for call in options.calls if own else calls:
                row = measure(lm, calls[call], n, options.rounds)
                yield {"model": name, "dtype": dtype, "task": task.name, "call": call, **row}


if __name__ == "__main__":
    main()
