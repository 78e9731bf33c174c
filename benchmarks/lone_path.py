"""One caller on one path: AsyncLM with one more token per call, compared with a cached forward.

At several lengths, 100 contexts one after the other, each a token longer than the last. Sides,
in turn in one run:

  AsyncLM       next_token_logprobs_sync(ids[:n]) for each n
  by hand       Transformers: one forward of one token over a DynamicCache, then log-softmax
  engine alone  our engine called directly with one row over one fragment, then log-softmax: what
                is left to gain by a host that costs nothing

A two-layer Llama (random, 256 wide, 2,048 tokens in the vocabulary), the embedded model; float32,
one thread, CPU time of the process, medians. x: AsyncLM by what is done by hand.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from common import median, report
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import weft
from weft import AsyncLM
from weft.engines.base import Row
from weft.engines.torch.model import cache_name

TINY = Path(str(files("weft") / "data" / "tiny"))
MUST = 1.15


def two_layers(folder: Path) -> Path:
    """A small random model with the embedded model's tokenizer, in a folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def calls_of(folder: Path, engine: str, ids: list[int], start: int) -> Iterator[Callable[[], Any]]:
    """Weft's side: the calls after `start` tokens."""
    lm = weft.load(str(folder), engine=engine, dtype="float32")
    model = AsyncLM(lm)
    model.next_token_logprobs_sync(ids[:start])
    for n in range(start + 1, len(ids) + 1):
        yield lambda n=n: model.next_token_logprobs_sync(ids[:n])
    lm.close()


def by_hand(folder: Path, ids: list[int], start: int) -> Iterator[Callable[[], Any]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = {cache_name(model): DynamicCache()}

    def run(some: list[int]) -> Any:
        with torch.inference_mode():
            out = model(torch.tensor([some]), **given, use_cache=True, logits_to_keep=1)
            return out.logits[0, -1].log_softmax(-1)

    run(ids[:start])
    for token in ids[start:]:
        yield lambda token=token: run([token])


def engine_alone(
    folder: Path, name: str, ids: list[int], start: int
) -> Iterator[Callable[[], Any]]:
    lm = weft.load(str(folder), engine=name, dtype="float32")
    engine, fragments = lm.engine, lm.tree.fragments
    assert fragments is not None
    fragment = fragments.new(None)

    def run(some: list[int]) -> Any:
        row = Row((), some, fragment.length, fragment, (len(some) - 1,))
        logits = engine.forward([row]).logits(0)
        below = logits - logits.max()
        return below - np.log(np.exp(below).sum())

    for first in range(0, start, 512):
        run(ids[first : min(first + 512, start)])
    fragments.settle(fragment)
    for token in ids[start:]:
        yield lambda token=token: run([token])
    fragments.free(fragment)
    lm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 200, 1000, 3900])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        models = {"two layers": two_layers(Path(directory)), "tiny": TINY}
        for name, folder in models.items():
            for engine in options.engines:
                for start in options.lengths:
                    if name == "tiny" and start + options.calls > 2048:
                        continue
                    rows.append(measured(name, folder, engine, start, options.calls))
    report("lone_path", rows, must=MUST)


def measured(name: str, folder: Path, engine: str, start: int, n: int) -> dict[str, Any]:
    rng = np.random.default_rng(start)
    ids = rng.integers(5, 2000, start + n).tolist()
    sides = (
        calls_of(folder, engine, ids, start),
        by_hand(folder, ids, start),
        engine_alone(folder, engine, ids, start),
    )
    took: list[list[float]] = [[] for _ in sides]
    for calls in zip(*sides, strict=True):
        for seconds, call in zip(took, calls, strict=True):
            began = time.process_time()
            got = np.asarray(call())
            seconds.append(time.process_time() - began)
            del got
    ours, hand, alone = (median(seconds) * 1e3 for seconds in took)
    return {
        "model": name,
        "engine": engine,
        "tokens": start,
        "AsyncLM ms": ours,
        "by hand ms": hand,
        "x": ours / hand,
        "engine alone ms": alone,
        "x alone": ours / alone,
    }


if __name__ == "__main__":
    main()
