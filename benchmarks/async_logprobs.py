"""Concurrent samplers over a shared prompt, by next-token log-probabilities.

16 samplers, 64 tokens each, one 512-token prompt, the embedded model, float32, torch engine.
Sides, in turn in one run:

  AsyncLM       16 tasks that await next_token_logprobs, each draws for itself
  by hand       one prefill, the KV repeated, 64 batched steps with full log-softmax and multinomial
  genlm         the same tasks through genlm-backend's AsyncTransformer, where it is installed

Then AsyncLM answers 100,000 contexts (--contexts), and the size of its caches is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from common import median, report, table
from cpu_tree import prompt_ids

TINY = Path(str(files("weft") / "data" / "tiny"))
MUST = 1.3


async def samplers(model: Any, ids: list[int], n: int, n_new: int) -> int:
    """n tasks that draw n_new tokens each; return the number of drawn tokens."""

    async def one(seed: int) -> int:
        rng, path = np.random.default_rng(seed), list(ids)
        for _ in range(n_new):
            row = np.asarray(await model.next_token_logprobs(path))
            path.append(int((row + rng.gumbel(size=len(row))).argmax()))
        return len(path) - len(ids)

    return sum(await asyncio.gather(*map(one, range(n))))


def by_hand(model: Any, ids: list[int], n: int, n_new: int) -> int:
    """Run the loop that a user with one known prompt would write."""
    import torch
    from transformers import DynamicCache

    from weft.engines.torch.model import cache_name

    with torch.inference_mode():
        cache = DynamicCache()
        given = {cache_name(model): cache}
        first = model(torch.tensor([ids]), **given, use_cache=True)
        cache.batch_repeat_interleave(n)
        logits = first.logits[:, -1].expand(n, -1)
        for _ in range(n_new):
            logprobs = logits.float().log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1)
            logits = model(tokens, **given, use_cache=True).logits[:, -1]
    return n * n_new


def sides(n: int, n_new: int) -> dict[str, Any]:
    """Return each side's job."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import weft

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    hf = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    lm = weft.load("tiny", engine="torch", dtype="float32")
    model, ids = weft.AsyncLM(lm, as_torch=False), prompt_ids()

    def ours() -> int:
        lm.clear_cache()
        return asyncio.run(samplers(model, ids, n, n_new))

    jobs: dict[str, Any] = {"AsyncLM": ours, "by hand": lambda: by_hand(hf, ids, n, n_new)}
    if importlib.util.find_spec("genlm") is not None:
        from genlm.backend.llm import AsyncTransformer

        tokenizer = AutoTokenizer.from_pretrained(TINY)

        def peer() -> int:
            theirs = AsyncTransformer(hf, tokenizer)
            theirs.cache_kv(ids)
            return asyncio.run(samplers(theirs, ids, n, n_new))

        jobs["genlm"] = peer
    return jobs


def bounded(n_contexts: int) -> dict[str, Any]:
    """Query many contexts on the NumPy engine and return the maximum sizes of the caches."""
    import weft

    lm = weft.load("tiny", kv_budget="64MiB")
    model, ids = weft.AsyncLM(lm), prompt_ids()[:32]
    rng = np.random.default_rng(0)
    max_rows = max_kv = n_answered = 0

    async def ask(size: int) -> None:
        tails = rng.integers(0, lm.info.n_vocab, (size, 3))
        await asyncio.gather(*(model.next_token_logprobs([*ids, *tail]) for tail in tails.tolist()))

    began = time.perf_counter()
    while n_answered < n_contexts:
        asyncio.run(ask(1000))
        n_answered += 1000
        max_rows = max(max_rows, lm.scheduler.logits_cache.used_bytes)
        max_kv = max(max_kv, lm.stats().kv_bytes)
    return {
        "contexts": n_answered,
        "s": round(time.perf_counter() - began, 1),
        "rows MB": round(max_rows / 1e6, 1),
        "of": round(lm.scheduler.logits_cache.budget_bytes / 1e6, 1),
        "KV MB": round(max_kv / 1e6, 1),
        "of ": round((64 << 20) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samplers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--contexts", type=int, default=0)
    options = parser.parse_args()
    jobs = sides(options.samplers, options.tokens)
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(options.rounds + 1):
        for name, job in jobs.items():
            began = time.perf_counter()
            n_drawn = job()
            assert n_drawn == options.samplers * options.tokens
            if number:  # the first round warms up
                taken[name].append(time.perf_counter() - began)
    ratios = {
        name: median([a / b for a, b in zip(times, taken["by hand"], strict=True)])
        for name, times in taken.items()
    }
    rows = [
        {
            "side": name,
            "s": round(median(times), 2),
            "tok/s": round(options.samplers * options.tokens / median(times)),
            "x by hand": round(ratios[name], 2),
            "must": MUST if name == "AsyncLM" else "",
        }
        for name, times in taken.items()
    ]
    more: dict[str, Any] = {}
    if options.contexts:
        more["bounded"] = bounded(options.contexts)
        print(table([more["bounded"]]))
    report("async_logprobs", rows, samplers=options.samplers, tokens=options.tokens, **more)


if __name__ == "__main__":
    main()
