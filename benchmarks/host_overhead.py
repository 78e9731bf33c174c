"""Weft's own cost of a step: scheduler, tree, stop strings and detokenising on a stub engine.

Process CPU time, not wall clock, so other processes do not matter much. One run: prefill once, then
`--steps` steps of n branches through `Loom.grow`, `Loom.stream` and `BranchStore.commit`; medians
over `--repeat` runs. Then n callers of `AsyncLM`, each of which goes on by one token a step: median
and least; `--callers` for these alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import weft
from weft import LM, AsyncLM, Branch, BranchStore, Loom
from weft._core.sched.work import Extend
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.stub import StubEngine

BRANCHES = (1, 8, 32, 128, 512)
BUDGET_MS, BUDGET_US = 0.3, 10.0  # a step, and a branch of it
CALLERS = ((1, 64), (16, 64), (256, 64), (256, 2048))  # and how many tokens their contexts share
N_PRODUCING, PRODUCE_MS = 32, 0.3
PRODUCING: dict[str, dict[str, Any]] = {
    "plain": {},
    "grammar": {"constraint": weft.constraints.Regex(r"[a-z ,.]{200,}")},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 2.0, 11: -4.0}},
    "steered": {},
}


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


def branch_s(n: int, steps: int) -> float:
    """CPU seconds of `steps` turns of n branches: produce on each, then one commit of all."""
    lm = make_lm()
    root, store = Branch.create(lm, seed=1), BranchStore(lm)
    root.prefill([5] * 32)
    branches = [root.fork() for _ in range(n)]
    store.commit([(branch, branch.produce().token) for branch in branches])
    began = time.process_time()
    for _ in range(steps):
        store.commit([(branch, branch.produce().token) for branch in branches])
    took = time.process_time() - began
    lm.close()
    return took


def caller_us(n: int, n_shared: int, steps: int) -> float:
    """CPU microseconds a caller and step: n callers of `AsyncLM` that go on by a token a step."""
    lm = make_lm()
    model, n_vocab = AsyncLM(lm), lm.info.n_vocab
    shared = [5 + 3 * i % 500 for i in range(n_shared)]

    async def one(path: list[int]) -> None:
        for step in range(steps):
            await model.next_token_logprobs(path)
            path.append((7 * path[n_shared] + 31 * step) % n_vocab)

    async def all_of_them() -> float:
        paths = [[*shared, k + 5] for k in range(n)]
        await asyncio.gather(*map(model.next_token_logprobs, paths))
        n_before, began = lm.stats().steps, time.process_time()
        await asyncio.gather(*(one([*path, 9]) for path in paths))
        took = time.process_time() - began
        assert lm.stats().steps == n_before + steps, "callers did not share their steps"
        return took

    took = asyncio.run(all_of_them())
    lm.close()
    return took / n / steps * 1e6


def print_callers(repeat: int) -> list[dict[str, Any]]:
    """Time all kinds of callers in turn; print, and return them."""
    record = []
    print(f"{'callers':>8} {'shared tokens':>14} {'µs a caller and step':>22} {'minimum':>8}")
    rounds = [
        [caller_us(n, n_shared, max(6, min(200, 3072 // n))) for n, n_shared in CALLERS]
        for _ in range(repeat)
    ]
    for (n, n_shared), took in zip(CALLERS, zip(*rounds, strict=True), strict=True):
        median, minimum = statistics.median(took), min(took)
        print(f"{n:8} {n_shared:14} {median:22.1f} {minimum:8.1f}")
        record.append({"n": n, "n_shared": n_shared, "caller_us": median, "least_us": minimum})
    return record


def produce_ms(kind: str, steps: int = 40) -> float:
    """Median CPU ms of a produce on each of 32 branches, which the commit before has drawn for."""
    lm = weft.load("tiny")
    store, root = BranchStore(lm), Branch.create(lm, seed=1, **PRODUCING[kind])
    root.prefill(list(lm.text.encode("A list of things: ")))
    branches = [root.fork() for _ in range(N_PRODUCING)]
    if kind == "steered":
        for branch in branches:
            branch.steer({7: 1.5, 9: -2.0})
    took = []
    for _ in range(steps):
        began = time.process_time()
        pieces = [branch.produce() for branch in branches]
        took.append(time.process_time() - began)
        pairs = [(b, p.token) for b, p in zip(branches, pieces, strict=True) if not p.is_stop]
        branches = [branch for branch, _ in pairs]
        if len(pairs) < N_PRODUCING:
            break
        store.commit(pairs)
    lm.close()
    return statistics.median(took[1:]) * 1e3


def branch_fork_us() -> float:
    """Median microseconds of a fork of a branch that is being decoded, 32k tokens in."""
    lm = make_lm()
    root = Branch.create(lm, seed=1)
    root.prefill([5] * 32_768)
    took = []
    for _ in range(500):
        root.commit(root.produce().token)
        began = time.perf_counter()
        fork = root.fork()
        took.append(time.perf_counter() - began)
        del fork
    lm.close()
    return statistics.median(took) * 1e6


def fork_us() -> float:
    """Median microseconds of a fork of a 32k-token path; no KV is touched."""
    lm = make_lm()
    place = lm.place([7] * 32_768)
    lm.drive(lm.submit([Extend(place)]))
    kv_before, took = lm.stats().kv_tokens, []
    for _ in range(2000):
        began = time.perf_counter()
        fork = place.fork()
        took.append(time.perf_counter() - began)
        del fork
    assert lm.stats().kv_tokens == kv_before
    lm.close()
    return statistics.median(took) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--callers", action="store_true", help="time callers of AsyncLM alone")
    options = parser.parse_args()
    if options.callers:
        callers = print_callers(options.repeat)
        print(json.dumps({"benchmark": "host_overhead", "callers": callers}))
        return
    names = ("grow", "stream", "branch")
    print(f"{'branches':>8}", *(f"{name + ' ms/step':>15}" for name in names), " budget ms")
    record = []
    for n in BRANCHES:
        rounds = [
            [timed(n, options.steps) for timed in (grow_s, stream_s, branch_s)]
            for _ in range(options.repeat)
        ]
        medians = [
            statistics.median(each) * 1e3 / options.steps for each in zip(*rounds, strict=True)
        ]
        budget = BUDGET_MS + BUDGET_US * n / 1e3
        print(f"{n:8}", *(f"{median:15.3f}" for median in medians), f"{budget:10.2f}")
        times = {f"{name}_ms": ms for name, ms in zip(names, medians, strict=True)}
        record.append({"n": n, **times, "budget_ms": budget})
    callers = print_callers(options.repeat)
    fork, branch_fork = fork_us(), branch_fork_us()
    print(f"fork of a 32,768-token path: {fork:.1f} µs; of a branch there: {branch_fork:.1f} µs")
    print("(budget 50)")
    producing = {kind: produce_ms(kind) for kind in PRODUCING}
    shown = ", ".join(f"{kind} {ms:.3f}" for kind, ms in producing.items())
    print(f"produce on {N_PRODUCING} branches, ms: {shown} (budget {PRODUCE_MS})")
    forks = {"produce_ms": producing, "fork_us": fork, "branch_fork_us": branch_fork}
    line = {"benchmark": "host_overhead", "steps": options.steps, "rows": record}
    line = {**line, "callers": callers, **forks}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
