"""Long texts of many children, read together: whether sharing a step's tokens costs anything.

A 512-token prompt of the embedded model has 64 children with texts of 500 tokens, and all of them
are continued by one token. Sides, in turn in one process, with one thread, CPU time:

  together      one call for all: the scheduler cuts texts so that each step is full, and a step of
                512 tokens has 12 to spare next to a text of 500
  one by one    a call a child: every text runs in one step, and steps are not full

must: together ÷ one by one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import median, report
from cpu_tree import prompt_ids

import weft

N_CHILDREN, N_TEXT = 64, 500
MUST = 1.1


def seconds(loom: Any, numbers: random.Random, *, together: bool) -> float:
    """CPU time of reading new texts below the prompt; they are removed afterwards."""
    ids = [[numbers.randrange(10, 2000) for _ in range(N_TEXT)] for _ in range(N_CHILDREN)]
    children = [loom.add(text) for text in ids]
    began = time.process_time()
    for nodes in [children] if together else [[child] for child in children]:
        loom.grow(n=1, at=nodes, max_tokens=1)
    taken = time.process_time() - began
    for child in children:
        child.remove()
    return taken


def measure(engine: str, rounds: int) -> dict[str, Any]:
    lm = weft.load("tiny", engine=engine, dtype="float32")
    numbers = random.Random(0)
    pairs = []
    with weft.Loom(lm, prompt_ids()) as loom:
        loom.grow(n=1, max_tokens=1)  # reads the prompt
        for _ in range(rounds):
            pairs.append([seconds(loom, numbers, together=each) for each in (True, False)])
    lm.close()
    return {
        "engine": engine,
        "together s": median([a for a, _ in pairs]),
        "one by one s": median([b for _, b in pairs]),
        "together / one by one": median([a / b for a, b in pairs]),
        "must": f"≤ {MUST}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report("texts", [measure(engine, options.rounds) for engine in options.engines])


if __name__ == "__main__":
    main()
