"""What Weft itself costs a step: scheduler, tree, stop strings and detokenising on a stub engine.

Process CPU time, not wall clock, so other processes do not matter much. One run: prefill once, then
`--steps` steps of n branches through `Loom.grow` and through `Loom.stream`; medians over `--repeat`
runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.resources import files
from pathlib import Path

from weft import LM, Loom
from weft.engines.stub import StubEngine
from weft.sched.work import Extend
from weft.tokens.tokenizer import Tokenizer

BRANCHES = (1, 8, 32, 128, 512)
BUDGET_MS, BUDGET_US = 0.3, 10.0  # a step, and a branch of it


def make_lm() -> LM:
    """An LM over the stub engine with the embedded model's real tokenizer."""
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return LM(StubEngine(n_vocab=text.n_vocab), text, n_batch=4096)


def grow_s(n: int, steps: int) -> float:
    """CPU seconds of one grow of n branches, `steps` tokens each, watching for a stop string."""
    lm = make_lm()
    loom = Loom(lm, "Use 4 9 10 13 to make 24.")
    loom.grow(n=1, max_tokens=2, seed=0)
    began = time.process_time()
    loom.grow(n=n, max_tokens=steps, stop="no such text", seed=1)
    took = time.process_time() - began
    lm.close()
    return took


def stream_s(n: int, steps: int) -> float:
    """The same, streamed."""
    lm = make_lm()
    loom = Loom(lm, "Use 4 9 10 13 to make 24.")
    loom.grow(n=1, max_tokens=2, seed=0)
    began = time.process_time()
    for _ in loom.stream(n=n, max_tokens=steps, stop="no such text", seed=1):
        pass
    took = time.process_time() - began
    lm.close()
    return took


def fork_us() -> float:
    """Median microseconds of a fork of a 32k-token path; no KV is touched."""
    lm = make_lm()
    place = lm.place([7] * 32_768)
    lm.drive(lm.submit([Extend(place)]))
    held, took = lm.stats().kv_tokens, []
    for _ in range(2000):
        began = time.perf_counter()
        fork = place.fork()
        took.append(time.perf_counter() - began)
        del fork
    assert lm.stats().kv_tokens == held
    lm.close()
    return statistics.median(took) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{'branches':>8} {'grow ms/step':>13} {'stream ms/step':>15} {'budget':>7}  µs a branch")
    record = []
    for n in BRANCHES:
        rounds = [
            (grow_s(n, options.steps), stream_s(n, options.steps)) for _ in range(options.repeat)
        ]
        grow, stream = (
            statistics.median(r[i] for r in rounds) * 1e3 / options.steps for i in (0, 1)
        )
        budget = BUDGET_MS + BUDGET_US * n / 1e3
        print(f"{n:8} {grow:13.3f} {stream:15.3f} {budget:7.2f}  {grow * 1e3 / n:6.1f}")
        record.append({"n": n, "grow_ms": grow, "stream_ms": stream, "budget_ms": budget})
    fork = fork_us()
    print(f"fork of a 32,768-token path: {fork:.1f} µs (budget 50)")
    line = {"benchmark": "host_overhead", "steps": options.steps, "rows": record, "fork_us": fork}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
