"""The cost of a step's draw over large vocabularies: NumPy's passes compared with PyTorch's.

Random rows of logits: `zipf` falls as a language model's do, `flat` as a random model's. Sides, in
turn in one process, log-probabilities and entropies of all tokens included:

  numpy    `BatchSampler.draw`, the reference
  torch    the same with PyTorch's passes over the rows: what the torch engine does on a CPU

ms are medians of wall-clock time over `--repeat` rounds; x is numpy / torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from common import median, report

from weft import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BatchSampler, DrawBatch, Sampler
from weft.constraints.base import n_words
from weft.constraints.kinds import AllowMatcher
from weft.engines.torch.sampling.cpu_reductions import TorchReductions

RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 40, top_p 0.95": {"top_k": 40, "top_p": 0.95},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "a mask": {},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def zipf(n: int, n_vocab: int) -> np.ndarray:
    """Logits that fall by 1.4 a factor e of the rank, in any order: float32 [n, n_vocab]."""
    rng = np.random.default_rng(0)
    logits = -1.4 * np.log(np.arange(1, n_vocab + 1)) + rng.standard_normal((n, n_vocab)) / 2
    return np.ascontiguousarray(rng.permuted(logits, axis=1), dtype=np.float32)


def flat(n: int, n_vocab: int) -> np.ndarray:
    """Normal logits of deviation 0.6, as a random half-billion model's: float32 [n, n_vocab]."""
    return (np.random.default_rng(0).standard_normal((n, n_vocab)) * 0.6).astype(np.float32)


SHAPES = {"zipf": zipf, "flat": flat}


def samplers(rule: str, n: int, n_vocab: int) -> list[Sampler]:
    random = np.random.default_rng(1)
    params, matcher = SamplingParams(**RULES[rule]), None
    if rule == "a mask":
        bits = random.integers(-(2**31), 2**31, size=n_words(n_vocab), dtype=np.int32)
        matcher = AllowMatcher(frozenset(range(n_vocab)), bits)
    chains = [Sampler(params, stream_of(1, (i,)), matcher) for i in range(n)]
    for one in chains:
        one.prime(random.integers(n_vocab, size=500).tolist())
    return chains


def sides(rule: str, logits: np.ndarray) -> dict[str, Callable[[int], object]]:
    n, n_vocab = logits.shape
    chain, reductions = BatchSampler(samplers(rule, n, n_vocab)), TorchReductions()
    rows = np.arange(n)

    def batch(position: int) -> DrawBatch:
        return DrawBatch(rows, chain, np.full(n, position, dtype=np.uint64))

    draws: dict[str, Callable[[int], object]] = {
        "numpy": lambda position: batch(position).on_host(logits),
        "torch": lambda position: batch(position).on_host(logits, reductions),
    }
    return draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 131_072])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["zipf", "flat"])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for n_vocab in options.vocabularies:
        for n in options.rows:
            for shape in options.shapes:
                logits = SHAPES[shape](n, n_vocab)
                for rule in options.rules:
                    runs = sides(rule, logits)
                    taken: dict[str, list[float]] = {name: [] for name in runs}
                    for position in range(options.repeat + 1):
                        for name, run in runs.items():
                            began = time.perf_counter()
                            run(position)
                            taken[name].append((time.perf_counter() - began) * 1e3)
                    ms = {name: median(each[1:]) for name, each in taken.items()}
                    place = {"vocabulary": n_vocab, "rows": n, "logits": shape, "rules": rule}
                    named = {f"{name} ms": value for name, value in ms.items()}
                    results.append({**place, **named, "x": ms["numpy"] / ms["torch"]})
    report("draws", results, threads=options.threads)


if __name__ == "__main__":
    main()
