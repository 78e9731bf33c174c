"""The torch engine on a CPU and Transformers' own cached forward, at half a billion weights.

A random model of the run, of the shape of Qwen2-0.5B (24 layers, 896 wide, 14 heads over 2,
151,936 tokens in the vocabulary, the output layer is the embedding), or, by `--shape`, of Gemma 3
with 270 million weights, Pythia with 410 million, or the 32 experts of Granite MoE, 1.3 billion of
which 0.4 are active. Sides, in turn in one process:

  weft          `Loom.grow` from a prompt whose KV is there; log-probabilities, entropies recorded
  transformers  the prompt prefilled once, its cache repeated n times, one forward and one draw for
                all n a step (`generate` would prefill the prompt n times)

ms a step is CPU time of one thread, the median over the rounds; x is the median of the rounds' own
ratios. `prefill`: ms a prompt of n that share nothing, sent to `AsyncLM` together, and one batch
of Transformers.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
import transformers
from common import median, report
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteMoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import weft
from weft.engines.torch.model import cache_name

TEMPERATURE = 0.8
N_STEPS = {1: 8, 8: 4, 32: 3}
MUST = {
    ("bfloat16", 512): {1: 1.8, 8: 3.0, 32: 3.0},
    ("bfloat16", 4000): {1: 3.0, 8: 9.0, 32: 14.0},
}
Job = Callable[[], None]
READ_BYTES = 1 << 30


def read_rate() -> float:
    """Return the bytes a second that one thread reads from memory, the best of some reductions."""
    numbers = torch.ones(READ_BYTES // 4)
    rates = []
    for _ in range(5):
        for read in (numbers.sum, numbers.max, lambda: torch.dot(numbers, numbers)):
            began = time.process_time()
            read()
            rates.append(READ_BYTES / (time.process_time() - began))
    return max(rates)


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=1024,  # a longer prompt is cut off in a cache that can then not be cropped
        max_position_embeddings=8192,
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=32,
        num_experts_per_tok=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "pythia": lambda: GPTNeoXConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=8192,
    ),
}


def random_model(folder: Path, shape: str, dtype: str) -> None:
    """Write a random model of a shape, and a tokenizer for its vocabulary."""
    torch.manual_seed(0)
    config = SHAPES[shape]()
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    words = Tokenizer(models.BPE({f"t{i}": i for i in range(config.vocab_size)}, []))
    words.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def prompt(n: int, number: int = 0) -> list[int]:
    return [(i * i * 7 + 13 * i + 5 + 1009 * number) % 150_000 for i in range(n)]


class Theirs:
    """Transformers by hand."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.cache_name = cache_name(self.model)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor(prompts)
        out = self.model(ids, **{self.cache_name: cache}, use_cache=True, logits_to_keep=1)
        self._draw(out.logits[:, -1])
        return cache

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        out = self.model(ids[:, None], **{self.cache_name: cache}, use_cache=True, logits_to_keep=1)
        return self._draw(out.logits[:, -1])

    def n_bytes(self, cache: DynamicCache) -> int:
        """Return the size of the weights and of one branch's KV."""
        kv = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return sum(each.numel() * each.element_size() for each in [*self.model.parameters(), *kv])

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        chances = (logits.float() / TEMPERATURE).softmax(-1)
        return torch.multinomial(chances, 1)[:, 0]

    def grower(self, cache: DynamicCache, n: int, n_steps: int) -> Job:
        cache.batch_repeat_interleave(n)

        def job() -> None:
            ids = torch.full((n,), 5)
            for _ in range(n_steps):
                ids = self.step(ids, cache)
            cache.crop(-n_steps)

        return job


def seconds(job: Job) -> float:
    began = time.process_time()
    job()
    return time.process_time() - began


def in_turn(ours: Job, theirs: Job, rounds: int, per: int) -> dict[str, float]:
    """Run both, `rounds` times after a warm-up; return ms and the ratio."""
    ours(), theirs()
    mine, other = [], []
    for _ in range(rounds):
        mine.append(seconds(ours) / per * 1e3)
        other.append(seconds(theirs) / per * 1e3)
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return {"weft ms": median(mine), "transformers ms": median(other), "x": median(ratios)}


def compare(dtype: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    random_model(folder, options.shape, dtype)
    lm = weft.load(str(folder), engine="torch", dtype=dtype, engine_options=options.given)
    theirs = Theirs(folder)
    rows, rate = [], read_rate()
    for length in options.prompts:
        ids = prompt(length)
        known = theirs.prefill([ids])
        floor = theirs.n_bytes(known) / rate * 1e3
        with weft.Loom(lm, ids) as loom:
            loom.grow(n=1, max_tokens=1)  # reads the prompt
            for n in options.n:
                n_steps = N_STEPS.get(n, 4)

                def ours(n: int = n, n_steps: int = n_steps, loom: Any = loom) -> None:
                    grown = loom.grow(n=n, max_tokens=n_steps + 1, temperature=TEMPERATURE)
                    for node in grown:
                        node.remove()

                other = theirs.grower(copy.deepcopy(known), n, n_steps)
                times = in_turn(ours, other, options.rounds, n_steps)
                is_named = options.shape == "qwen2"  # what the targets are about
                must = MUST.get((dtype, length), {}).get(n, "") if is_named else ""
                rows.append({"dtype": dtype, "what": "step", "prompt": length, "n": n, **times})
                rows[-1] |= {"floor ms": floor, "x there": times["transformers ms"] / floor}
                rows[-1]["must"] = must
                print(rows[-1], file=sys.stderr)
                del other
                gc.collect()
    model = weft.AsyncLM(lm, as_torch=False)
    numbers = itertools.count(1)  # no prompt comes twice, so nothing of it is known
    for count in options.prefill:

        def prompts(count: int = count) -> list[list[int]]:
            return [prompt(512, next(numbers)) for _ in range(count)]

        def read(prompts: Any = prompts) -> None:
            model.batch_next_token_logprobs_sync(prompts())

        def prefill(prompts: Any = prompts) -> None:
            theirs.prefill(prompts())

        times = in_turn(read, prefill, options.rounds, count)
        rows.append({"dtype": dtype, "what": "prefill", "prompt": 512, "n": count, **times})
        rows[-1]["must"] = 1.0
        print(rows[-1], file=sys.stderr)
    lm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4000])
    parser.add_argument("-n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "JSON"))
    options = parser.parse_args()
    options.given = {name: json.loads(value) for name, value in options.option}
    torch.set_num_threads(1)
    rows = []
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(dtype, options, Path(folder))
    report(
        "cpu_torch",
        rows,
        shape=options.shape,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
