"""The host's cost of a draw: Weft's chain compared with Transformers' warpers and a multinomial.

Rows of invented logits, shaped like a language model's (Zipf's law with noise), over a small and a
large vocabulary; log-probability and entropy of every token included on Weft's side. CPU time of
the process, one thread, medians over `--repeat` rounds that take both sides in turn.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from common import median, report
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weft import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BatchSampler, Sampler

RULES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.8": {"temperature": 0.8},
    "0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "0.8, top_k 40, top_p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "top_p 0.9": {"top_p": 0.9},
    "all four": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
# Rules without a warper in Transformers. DRY is measured for texts of several lengths.
OWN_RULES: dict[str, dict[str, Any]] = {
    "top_n_sigma 1": {"top_n_sigma": 1.0},
    "xtc 0.5": {"xtc_probability": 0.5},
    "min_p 0.05, xtc 0.5": {"min_p": 0.05, "xtc_probability": 0.5},
}
DRY_LENGTHS = (100, 1_000, 10_000, 100_000)


def rows(n: int, n_vocab: int) -> np.ndarray:
    """Logits that fall by 1.4 a factor e of the rank, in any order: float32 [n, n_vocab]."""
    rng = np.random.default_rng(0)
    ranks = np.log(np.arange(1, n_vocab + 1))
    logits = -1.4 * ranks + rng.standard_normal((n, n_vocab)) / 2
    return np.ascontiguousarray(rng.permuted(logits, axis=1), dtype=np.float32)


def ours(
    logits: np.ndarray, options: dict[str, Any], prompt: Sequence[int] = ()
) -> Callable[[], object]:
    """Return a call that draws a token for each row.

    prompt: the tokens that DRY searches.
    """
    n = len(logits)
    samplers = [Sampler(SamplingParams(**options), stream_of(1, (i,))) for i in range(n)]
    for sampler in samplers:
        sampler.add_prompt(prompt)
    chain = BatchSampler(samplers)
    position = [0]

    def draw() -> object:
        position[0] += 1
        at = np.full(n, position[0], dtype=np.uint64)
        return chain.draw(logits, np.arange(n), at)

    return draw


def theirs(logits: np.ndarray, options: dict[str, Any]) -> Callable[[], object]:
    table, warpers = torch.from_numpy(logits), LogitsProcessorList()
    kinds = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    for name, kind in kinds.items():
        if name in options:
            warpers.append(kind(options[name]))
    ids = torch.zeros((len(logits), 1), dtype=torch.long)

    def draw() -> object:
        return torch.multinomial(torch.softmax(warpers(ids, table), dim=-1), 1)

    return draw


def text_of(n: int, n_vocab: int, *, repeated: bool) -> list[int]:
    """Return n token ids by Zipf's law; repeated: one sentence of twenty tokens again and again."""
    ranks = np.random.default_rng(1).zipf(1.3, n)
    ids: list[int] = np.minimum(ranks, n_vocab - 1).tolist()
    return (ids[:20] * (n // 20 + 1))[:n] if repeated else ids


def own_costs(logits: np.ndarray, repeat: int) -> list[dict[str, Any]]:
    """Measure the rules that Transformers lacks against the same draw without them."""
    n, n_vocab = logits.shape
    n_draws = max(2, 200_000 // (n * n_vocab // 32 + 1000))
    cases = [(name, given, ours(logits, given)) for name, given in OWN_RULES.items()]
    for length in DRY_LENGTHS:
        for repeated in (False, True):
            text = text_of(length, n_vocab, repeated=repeated)
            name = f"dry 0.8, {length:,} tokens{', repeated' if repeated else ''}"
            given = {"dry_multiplier": 0.8}
            cases.append((name, given, ours(logits, given, text)))
    plain = ours(logits, {})
    results = []
    for name, _, draw in cases:
        plain(), draw()
        taken = [[cost_ms(side, n_draws) for side in (draw, plain)] for _ in range(repeat)]
        mine, without = (median(each) for each in zip(*taken, strict=True))
        results.append(
            {
                "rule": name,
                "vocabulary": n_vocab,
                "rows": n,
                "weft ms": mine,
                "temperature 1 ms": without,
            }
        )
    return results


def cost_ms(draw: Callable[[], object], n: int) -> float:
    began = time.process_time()
    for _ in range(n):
        draw()
    return (time.process_time() - began) * 1e3 / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[2048, 131_072])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, own_results = [], []
    for n_vocab in options.vocabularies:
        for n in options.rows:
            logits = rows(n, n_vocab)
            for rule, given in RULES.items():
                sides = [ours(logits, given), theirs(logits, given)]
                n_draws = max(2, 200_000 // (n * n_vocab // 32 + 1000))
                for side in sides:
                    side()
                taken = [[cost_ms(side, n_draws) for side in sides] for _ in range(options.repeat)]
                mine, other = (median(each) for each in zip(*taken, strict=True))
                results.append(
                    {
                        "rule": rule,
                        "vocabulary": n_vocab,
                        "rows": n,
                        "weft ms": mine,
                        "transformers ms": other,
                        "x": other / mine,
                    }
                )
            own_results += own_costs(logits, options.repeat)
    report("sampling", results)
    report("sampling without a peer", own_results)


if __name__ == "__main__":
    main()
