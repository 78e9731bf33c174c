"""More live branches than a step takes: 2,000 runs of 12 tokens from one prompt, in one call.

Runs without room in a step wait, the oldest run first (`n_batch`, by default 512 tokens). Sides,
in turn, each in a process of its own:

  one call   one `grow` of all
  waves      by hand: `grow` of `n_batch` branches, one call after the other
  rotated    by hand, as a scheduler that serves all alike: every branch gets its first half, wave
             by wave, before any gets its second

s is wall-clock time; MB is what the process grew by at its peak. x is against `waves`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from common import median, report

import weft
from weft import Loom

SIDES = ("one call", "waves", "rotated")
PROMPT = "Once upon a time, in a town by the sea, there lived"
N_BATCH = 512


def peak_mb() -> float:
    """Megabytes that this process had in memory at most (Linux: kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(side: str, engine: str, n: int, n_new: int) -> None:
    """Run one side once, after a warm-up, and print its results."""
    lm = weft.load("tiny", engine=engine, n_batch=N_BATCH, kv_budget="16GiB")
    given: dict[str, Any] = {"logit_bias": {lm.eog_token: float("-inf")}, "seed": 1}
    sizes = [min(N_BATCH, n - at) for at in range(0, n, N_BATCH)]
    Loom(lm, prompt=PROMPT).grow(n=4, max_tokens=4, **given)
    loom = Loom(lm, prompt=PROMPT)
    before, began = peak_mb(), time.perf_counter()
    if side == "one call":
        loom.grow(n=n, max_tokens=n_new, **given)
    elif side == "waves":
        for size in sizes:
            loom.grow(n=size, max_tokens=n_new, **given)
    else:
        half = n_new // 2
        leaves = [loom.grow(n=size, max_tokens=half, **given) for size in sizes]
        for some in leaves:
            loom.grow(at=some, max_tokens=n_new - half, **given)
    taken = time.perf_counter() - began
    assert len(loom.leaves) == n
    assert all(sum(len(each.tokens) for each in leaf.path[1:]) == n_new for leaf in loom.leaves)
    print(json.dumps({"s": taken, "MB": peak_mb() - before}))


def measure(side: str, engine: str, n: int, n_new: int) -> dict[str, float]:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--engines", engine]
    command += ["--runs", str(n), "--tokens", str(n_new)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"])
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return child(options.side, options.engines[0], options.runs, options.tokens)
    rows = []
    for engine in options.engines:
        taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(options.repeat):
            for side in SIDES:
                taken[side].append(measure(side, engine, options.runs, options.tokens))
        s = {side: median(each["s"] for each in taken[side]) for side in SIDES}
        for side in SIDES:
            mb = median(each["MB"] for each in taken[side])
            rows.append(
                {
                    "engine": engine,
                    "side": side,
                    "s": s[side],
                    "tok/s": options.runs * options.tokens / s[side],
                    "MB": mb,
                    "x": s[side] / s["waves"],
                }
            )
    report("many_runs", rows, runs=options.runs, tokens=options.tokens, n_batch=N_BATCH)


if __name__ == "__main__":
    main()
