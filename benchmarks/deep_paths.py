"""Branches below a path of many short nodes, as searches leave them that go on from the best.

The path: `generations` rounds of two texts of `each` tokens, the first of which is gone on from;
the others stay. Then n branches grow below its end. Sides, in turn in one process:

  one by one  every node of the path is met on its own (`lanes.JOINED` of 0)
  together    short nodes one below the other are met as one
  one node    the same tokens in one node: what is left to gain

The embedded model, ms a step of CPU time, one thread; x is the median of the rounds' own ratios of
the first to the second.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import median, report

import weft
from weft.engines import lanes
from weft.engines.numpy import step

N_STEPS = 8
PROMPT = [(7 * i * i + 13 * i + 5) % 500 + 4 for i in range(32)]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Let spans be met as they were before they were put together."""
    before = lanes.JOINED, step.SHORT
    lanes.JOINED = step.SHORT = 0
    try:
        yield
    finally:
        lanes.JOINED, step.SHORT = before


def grown(node: Any, generations: int, each: int, no_end: dict[int, float]) -> Any:
    """Go on from the first of two, again and again; return the last node."""
    for seed in range(generations):
        node, _ = node.grow(n=2, max_tokens=each, seed=seed, logit_bias=no_end)
    return node


def measured(engine: str, generations: int, each: int, n: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"one by one": [], "together": [], "one node": []}
    with weft.load("tiny", engine=engine) as lm, weft.load("tiny", engine=engine) as other:
        no_end = {token: float("-inf") for token in lm.text.stop_ids}
        deep = grown(weft.Loom(lm, PROMPT), generations, each, no_end)
        # Of another LM: this one would find the nodes that it has.
        whole = weft.Loom(other, [token for node in deep.path for token in node.tokens])

        def job(node: Any) -> float:
            began = time.process_time()
            kids = node.grow(n=n, max_tokens=N_STEPS + 1, temperature=1.0, logit_bias=no_end)
            took = time.process_time() - began
            for kid in kids:
                kid.remove()
            return 1e3 * took / N_STEPS

        def apart() -> float:
            with one_by_one():
                return job(deep)

        sides: dict[str, Callable[[], float]] = {
            "one by one": apart,
            "together": lambda: job(deep),
            "one node": lambda: job(whole),
        }
        for number in range(rounds + 1):
            for name, run in sides.items():
                took = run()
                if number:
                    times[name].append(took)
    ratios = [a / b for a, b in zip(times["one by one"], times["together"], strict=True)]
    row = {"engine": engine, "nodes": generations, "each": each, "n": n}
    return row | {name: median(kept) for name, kept in times.items()} | {"x": median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"], help="mlx is slow here")
    parser.add_argument("--generations", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("-n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        measured(engine, generations, options.each, n, options.rounds)
        for engine in options.engines
        for generations in options.generations
        for n in options.n
    ]
    report("deep_paths", rows)


if __name__ == "__main__":
    main()
