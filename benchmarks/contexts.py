"""Many concurrent contexts: the host's cost of one, and how long the event loop is blocked.

`--at` contexts, each of its own, run at once on an LM over a stub engine with 2,048 tokens in
the vocabulary: what the model takes is left out, so what stays is Weft's. Meanwhile a task wakes
every millisecond; the longest time between two of its turns is the gap in which no other task of
the program ran. Sides, in turn in one run:

  Weft            AsyncLM.next_token_logprobs
  bare loop       as many tasks that wait for a future each: what asyncio itself takes
  genlm-backend   its own batching queue over a model that answers at once, where it is installed

Process CPU time; the gap as CPU time of the loop's thread, and by the clock (other processes are in
that one). Medians over `--repeat` runs. The collector of cycles ignores the objects of
the start (`gc.freeze`), as in servers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report

import weft
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.stub import StubEngine

Ask = Callable[[Sequence[int]], Awaitable[Any]]
BUDGET_MS, GAP_MS = 0.2, 20.0  # a context at the largest size; the longest gap
PREFIX, VOCAB = 32, 2_048


def weft_side() -> tuple[Ask, Callable[[], object]]:
    """AsyncLM over the stub engine."""
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    lm = weft.LM(StubEngine(n_vocab=VOCAB), text, n_batch=4_096)
    return weft.AsyncLM(lm).next_token_logprobs, lm.close


def genlm_side() -> tuple[Ask, Callable[[], object]]:
    """genlm-backend's queue; its model gives the same tensor for every row."""
    import torch
    from genlm.backend.llm import AsyncTransformer

    class Same:
        """Answers as a Transformers model does."""

        device = torch.device("cpu")

        def __call__(self, input_ids: Any, **more: Any) -> Any:
            rows = torch.zeros((*input_ids.shape, VOCAB))
            return type("Output", (), {"logits": rows, "past_key_values": None})()

    longest_gaps: Any = AsyncTransformer(
        Same(), type("Text", (), {"pad_token_id": 0})(), batch_size=4_096
    )
    return longest_gaps.next_token_logprobs, lambda: None


def bare_side() -> tuple[Ask, Callable[[], object]]:
    """Futures that are set 64 in a pass of the loop."""
    futures: list[asyncio.Future[None]] = []

    def answer() -> None:
        for future in futures[:64]:
            future.set_result(None)
        del futures[:64]
        if futures:
            asyncio.get_running_loop().call_soon(answer)

    async def ask(ids: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        if not futures:
            loop.call_later(0.01, answer)
        futures.append(loop.create_future())
        await futures[-1]

    return ask, lambda: None


async def longest_gaps(ask: Ask, contexts: list[list[int]]) -> tuple[float, float]:
    """Ask all at once; return the longest gaps between two turns of another task: CPU ms, ms."""
    gaps, over = [(0.0, 0.0)], False

    async def look() -> None:
        last = time.thread_time(), time.perf_counter()
        while not over:
            await asyncio.sleep(0.001)
            now = time.thread_time(), time.perf_counter()
            gaps.append((now[0] - last[0], now[1] - last[1]))
            last = now

    looking = asyncio.ensure_future(look())
    await asyncio.sleep(0)
    tasks = [asyncio.ensure_future(ask(ids)) for ids in contexts]
    for task in tasks:  # as a program that consumes answers one by one
        await task
    over = True
    await looking
    busy, clock = (max(each) * 1e3 for each in zip(*gaps, strict=True))
    return busy, clock


def run(side: Callable[[], tuple[Ask, Callable[[], object]]], n: int) -> tuple[float, ...]:
    """Return CPU milliseconds a context, and the longest gaps."""
    rng = np.random.default_rng(n)
    prefix = rng.integers(0, VOCAB, PREFIX).tolist()
    contexts = [[*prefix, *tail] for tail in rng.integers(0, VOCAB, (n, 3)).tolist()]
    ask, close = side()
    gc.collect()
    gc.freeze()
    began = time.process_time()
    gaps = asyncio.run(longest_gaps(ask, contexts))
    took = time.process_time() - began
    gc.unfreeze()
    close()
    return took * 1e3 / n, *gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=int, nargs="+", default=[800, 3_200, 4_000, 12_800])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    sides = {"Weft": weft_side, "bare loop": bare_side}
    if importlib.util.find_spec("genlm") is not None:
        sides["genlm-backend"] = genlm_side
    runs: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for _ in range(args.repeat):
        for n in args.at:
            for name, side in sides.items():
                runs.setdefault((name, n), []).append(run(side, n))
    rows = [
        {
            "side": name,
            "contexts": n,
            "ms a context": median([result[0] for result in each]),
            "gap CPU ms": median([result[1] for result in each]),
            "gap ms": median([result[2] for result in each]),
        }
        for (name, n), each in runs.items()
    ]
    report("contexts", rows, budget={"ms a context": BUDGET_MS, "gap CPU ms at 4,000": GAP_MS})


if __name__ == "__main__":
    main()
