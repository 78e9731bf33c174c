"""Branches below a path of many short nodes, as searches leave them that go on from the best.

A path: `generations` rounds of two texts of `each` tokens, of which the first is gone on from; the
others stay. Then n branches grow below the ends of all paths at once. Sides, in turn in one run:

  one by one  every node of the path is attended on its own (`lanes.MAX_MERGED` of 0)
  together    short nodes one below the other are attended as one
  one node    the same tokens in one node: what is left to gain

The embedded model, ms a step of CPU time, one thread; x is the median of the rounds' own ratios of
the first to the second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import median, report

import weft
from weft.engines import shared_prefixes as prefixes
from weft.engines.numpy import step

N_STEPS = 8
PROMPT = [(7 * i * i + 13 * i + 5) % 500 + 4 for i in range(32)]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Attend spans one by one, as before they were merged."""
    before = prefixes.MAX_MERGED, step.MAX_SHORT
    prefixes.MAX_MERGED = step.MAX_SHORT = 0
    try:
        yield
    finally:
        prefixes.MAX_MERGED, step.MAX_SHORT = before


class Side:
    """An LM of its own: what one has moved together would be together for others, too."""

    def __init__(self, engine: str) -> None:
        self.lm = weft.load("tiny", engine=engine)
        self.no_end = {token: float("-inf") for token in self.lm.text.stop_ids}
        self.ends: list[Any] = []

    async def deepen(self, paths: int, generations: int, each: int) -> None:
        """Go on from the first of two, again and again, below each of some short branches."""
        loom = weft.Loom(self.lm, PROMPT)
        self.ends = [loom.add(PROMPT[at : at + 3]) for at in range(paths)]
        for seed in range(generations):
            grown = await asyncio.gather(
                *(
                    end.agrow(n=2, max_tokens=each, seed=seed, logit_bias=self.no_end)
                    for end in self.ends
                )
            )
            self.ends = [first for first, _ in grown]

    def copy(self, other: Side) -> None:
        """Have the same paths in one node each."""
        for end in other.ends:
            tokens = [token for node in end.path for token in node.tokens]
            self.ends.append(weft.Loom(self.lm, tokens))

    async def step(self, n: int) -> float:
        """Grow n branches below each end; return the CPU ms of a step."""
        began = time.process_time()
        jobs = [
            end.agrow(n=n, max_tokens=N_STEPS + 1, temperature=1.0, logit_bias=self.no_end)
            for end in self.ends
        ]
        grown = await asyncio.gather(*jobs)
        took = time.process_time() - began
        for kids in grown:
            for kid in kids:
                kid.remove()
        return 1e3 * took / N_STEPS


def measured(
    engine: str, paths: int, generations: int, each: int, branches: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    sides = {name: Side(engine) for name in ("one by one", "together", "one node")}
    with one_by_one():
        asyncio.run(sides["one by one"].deepen(paths, generations, each))
    asyncio.run(sides["together"].deepen(paths, generations, each))
    sides["one node"].copy(sides["together"])
    for n in branches:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                with one_by_one() if name == "one by one" else nullcontext():
                    took = asyncio.run(side.step(n))
                if number:
                    times[name].append(took)
        ratios = [a / b for a, b in zip(times["one by one"], times["together"], strict=True)]
        row = {"engine": engine, "paths": paths, "nodes": generations, "each": each, "n": n}
        yield row | {name: median(kept) for name, kept in times.items()} | {"x": median(ratios)}
    for side in sides.values():
        side.lm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"], help="mlx is slow here")
    parser.add_argument("--paths", type=int, nargs="+", default=[1], help="n branches below each")
    parser.add_argument("--generations", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("-n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        row
        for engine in options.engines
        for paths in options.paths
        for generations in options.generations
        for row in measured(engine, paths, generations, options.each, options.n, options.rounds)
    ]
    report("deep_paths", rows)


if __name__ == "__main__":
    main()
