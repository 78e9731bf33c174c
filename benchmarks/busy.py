"""A machine that is busy with something else: an engine's own choice of threads, and fixed.

Beside it run `--beside` processes that do nothing but count. In turn in one run, for each number of
them: `grow(n=8, max_tokens=60)` on the embedded model with threads "auto", 1 and 2 (torch: by
OMP_NUM_THREADS), each in a process of its own; seconds by the clock, medians over `--repeat`. `x`
is "auto" over the better fixed one: at most 1.3 is wanted. `pinned` is the same with the process
held to one CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common import median, report

WANTED = 1.3
JOB = """
import json, os, sys, time
engine, threads, pinned, n, tokens, grows = json.loads(sys.argv[1])
if pinned:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import weft
options = {"threads": threads} if engine == "numpy" else {}
lm = weft.load("tiny", engine=engine, engine_options=options)
took = []
for seed in range(grows):
    loom = weft.Loom(lm, "Use 4 9 10 13 to make 24.")
    began = time.perf_counter()
    loom.grow(n=n, max_tokens=tokens, seed=seed, min_p=0.02)
    took.append(time.perf_counter() - began)
print(json.dumps(sum(took)))
"""


def job_s(
    engine: str, threads: int | str, *, pinned: bool, n: int, tokens: int, grows: int
) -> float:
    """Seconds of the job in a process of its own; no other variable chooses its threads."""
    kept = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name}
    if engine == "torch" and threads != "auto":
        kept["OMP_NUM_THREADS"] = str(threads)
    asked = json.dumps([engine, threads, pinned, n, tokens, grows])
    command = [sys.executable, "-c", JOB, asked]
    done = subprocess.run(command, env=kept, check=True, capture_output=True, text=True)
    seconds: float = json.loads(done.stdout)
    return seconds


def count() -> None:
    """Keep a core busy."""
    n = 0
    while True:
        n += 1


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Run so many busy processes beside."""
    others = [multiprocessing.Process(target=count, daemon=True) for _ in range(n)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--grows", type=int, default=1, help="growths a process")
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--engine", choices=["numpy", "torch"], default="numpy")
    args = parser.parse_args()
    sides: tuple[int | str, ...] = ("auto", 1, 2)
    job = {"n": args.n, "tokens": args.tokens, "grows": args.grows}
    rows = []
    places = [(f"{n} beside", n, False) for n in args.beside]
    if hasattr(os, "sched_setaffinity"):
        places.append(("pinned, 0 beside", 0, True))
    for name, n, pinned in places:
        found: dict[int | str, list[float]] = {side: [] for side in sides}
        with busy(n):
            for _ in range(args.repeat):
                for side in sides:
                    found[side].append(job_s(args.engine, side, pinned=pinned, **job))
        auto, one, two = (median(found[side]) for side in sides)
        rows.append(
            {"machine": name, "auto s": auto, "1 s": one, "2 s": two, "x": auto / min(one, two)}
        )
    regime = {"engine": args.engine, "n": args.n, "max_tokens": args.tokens}
    report("busy", rows, budget={"x": WANTED}, **regime)


if __name__ == "__main__":
    main()
