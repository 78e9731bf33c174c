"""mlx-lm's own ways to continue one prompt n times, without an end token; seconds of the job.

Each takes what `mlx_lm.load` gives: peer(model, tokenizer, prompt_ids, n, max_tokens) -> seconds.
`loops` gives both for a folder, in float32, for `benchmarks/engines.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

TEMPERATURE, MIN_P = 0.6, 0.05


def loops(folder: str) -> list[Callable[[list[int], int, int], int]]:
    """Return functions (prompt_ids, n, max_tokens) -> generated tokens, over one loaded model."""
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())

    def counted(peer: Callable[..., float]) -> Callable[[list[int], int, int], int]:
        def loop(prompt_ids: list[int], n: int, max_tokens: int) -> int:
            peer(model, None, prompt_ids, n, max_tokens)
            return n * max_tokens

        return loop

    return [counted(replicate_once), counted(batch_generate)]


def batch_generate(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], n: int, max_tokens: int
) -> float:
    """mlx-lm's batch_generate, with the prompt n times. It prefills each of them."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    began = time.perf_counter()
    sampler = make_sampler(temp=TEMPERATURE, min_p=MIN_P)
    generator = BatchGenerator(model, stop_tokens=[], sampler=sampler)
    generator.insert([list(prompt_ids)] * n, [max_tokens] * n)
    n_tokens = 0
    while responses := generator.next_generated():
        n_tokens += len(responses)
    generator.close()
    assert n_tokens == n * max_tokens, n_tokens
    return time.perf_counter() - began


def replicate_once(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], n: int, max_tokens: int
) -> float:
    """Prefill the prompt once, repeat its KV for every branch, then decode all as one batch."""
    from mlx_lm.models.cache import make_prompt_cache

    began = time.perf_counter()
    cache = make_prompt_cache(model)
    logits = model(mx.array([list(prompt_ids)]), cache=cache)[:, -1]
    mx.eval(logits, [(each.keys, each.values) for each in cache])
    for layer in cache:
        layer.keys = mx.repeat(layer.keys[..., : layer.offset, :], n, axis=0)
        layer.values = mx.repeat(layer.values[..., : layer.offset, :], n, axis=0)
    tokens = _drawn(mx.repeat(logits, n, axis=0))
    mx.eval(tokens, [(each.keys, each.values) for each in cache])
    steps = []
    for _ in range(max_tokens - 1):
        following = _drawn(model(tokens[:, None], cache=cache)[:, -1])
        mx.async_eval(following)
        steps.append(tokens.tolist())
        tokens = following
    steps.append(tokens.tolist())
    assert [len(step) for step in steps] == [n] * max_tokens
    return time.perf_counter() - began


def _drawn(logits: mx.array) -> mx.array:
    """Draw a token a row: [B, V] to [B]."""
    logits = logits.astype(mx.float32) / TEMPERATURE
    floor = logits.max(axis=-1, keepdims=True) + mx.log(mx.array(MIN_P))
    return mx.random.categorical(mx.where(logits < floor, -mx.inf, logits))
