"""One row and two where weights are packed for oneDNN: as they are, and filled up to four.

Of three rows and four, which stay as they are, `filled` shows what the two measurements differ by.

`product`: one linear layer of a model of half a billion weights, µs by the clock, medians; so many
copies of its weight in turn that none is in a cache. `step`: `Loom.grow` of n branches below 512
tokens of prompt, at a shape of `cpu_torch.py`, ms of CPU time, both in turn in one process. One
thread; x is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import median, report
from cpu_torch import SHAPES, TEMPERATURE, prompt, random_model

import weft
from weft.engines.torch.weights import packed

LAYERS = [(896, 896), (9728, 896), (896, 4864), (151_936, 896)]
CACHE_NUMBERS = 50_000_000  # more than any cache holds
N_STEPS = 8


def product_rows(dtype: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for n_out, n_in in LAYERS:
        count = max(2, CACHE_NUMBERS // (n_out * n_in))
        tensors = (torch.randn(n_out, n_in).to(getattr(torch, dtype)) for _ in range(count))
        weights = itertools.cycle([packed.packed(weight) for weight in tensors])
        for n in (1, 2, 3, 4):
            x = torch.randn(n, n_in).to(getattr(torch, dtype))

            def job(x: torch.Tensor = x, weights: Any = weights) -> None:
                packed.product(x, next(weights), None)

            row = {"dtype": dtype, "what": f"product {n_in} to {n_out}", "n": n}
            rows.append(row | in_turn(job, 10 * rounds, time.perf_counter, 1e6))
    return rows


def step_rows(dtype: str, shape: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        random_model(Path(folder), shape, dtype)
        with weft.load(folder, engine="torch", dtype=dtype) as lm:
            loom = weft.Loom(lm, prompt(512))
            for n in (1, 2, 3):

                def job(n: int = n, loom: Any = loom) -> None:
                    for node in loom.grow(n=n, max_tokens=N_STEPS + 1, temperature=TEMPERATURE):
                        node.remove()

                row = {"dtype": dtype, "what": f"step of {shape}", "n": n}
                rows.append(row | in_turn(job, rounds, time.process_time, 1e3 / N_STEPS))
    return rows


def in_turn(
    job: Callable[[], None], rounds: int, clock: Callable[[], float], scale: float
) -> dict[str, float]:
    """Run a job with rows as they are and filled up, after a warm-up of each."""
    few = packed._FEW_ROWS
    packed._pads.clear()  # what was timed when the model was loaded
    times: dict[int, list[float]] = {0: [], few: []}
    try:
        for number in range(rounds + 1):
            for few_rows, kept in times.items():
                packed._FEW_ROWS = few_rows
                began = clock()
                job()
                if number:
                    kept.append((clock() - began) * scale)
    finally:
        packed._FEW_ROWS = few
    ratios = [a / b for a, b in zip(times[0], times[few], strict=True)]
    return {"as they are": median(times[0]), "filled": median(times[few]), "x": median(ratios)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["qwen2"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in options.dtypes:
        rows += product_rows(dtype, options.rounds)
        for shape in options.shapes:
            rows += step_rows(dtype, shape, options.rounds)
    report("few_rows", rows, torch=torch.__version__)


if __name__ == "__main__":
    main()
