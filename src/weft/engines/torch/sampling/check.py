"""The load check of sampling kernels: their results compared with the reference sampler's.

A compiler bug must not change tokens, so kernels are checked before they are used. The check also
compiles the common kernels at load, not during the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...._core.sampling.params import SamplingParams
from ...._core.sampling.sampler import BatchSampler, DrawBatch, Sampler
from ....constraints.base import n_words
from ....constraints.kinds import AllowMatcher
from ..cuda import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .sampler import TorchSampler

_N_ROWS, _N_SAMPLERS = 4, 32
_SPREAD = 3.0  # of the logits: some tokens are likely, as in a model's
_FIRST = (1 << 33) + 5  # needs more than 32 bits
# Allowed differences among 32 tokens: scores or a cutoff may be equal to rounding.
_TIES = 1
_FAR = 1e-3  # nats: values are float32
# Common parameters, each with its own kernels, strict enough to show errors in few draws.
_RULES: Mapping[str, Mapping[str, Any]] = {
    "temperatures alone": {},
    "a constraint": {"is_masked": True},
    "penalties and a bias": {"presence_penalty": 4.0, "logit_bias": {1: 8.0}},
    "top_p": {"top_p": 0.5},
    "top_k and top_p": {"top_k": 8, "top_p": 0.9},
    "min_p": {"min_p": 0.3},
}
_TEMPERATURES = (1.0, 0.6, 1.4, 0.0)

_agreed: set[tuple[torch.device, int, torch.dtype]] = set()


def sampling_difference(sampler: TorchSampler, n_vocab: int, dtype: torch.dtype) -> str:
    """Return a description of the first difference between kernels and reference, or "".

    n_vocab, dtype: of the engine's logits. Each combination is checked once a process.
    """
    key = (sampler.device, n_vocab, dtype)
    if key in _agreed:
        return ""
    logits_on_device = to_device(_logits(n_vocab), sampler.device).to(dtype)
    logits = logits_on_device.float().cpu().numpy()
    for name, rules in _RULES.items():
        batch = _batch(logits, **rules)
        drawn, wanted = sampler.draw(logits_on_device, batch).result(), batch.on_host(logits)
        is_same = drawn.ids == wanted.ids
        if (n := int((~is_same).sum())) > _TIES:
            return f"with {name} {n} of {_N_SAMPLERS} tokens are others than the reference's"
        for values, known in (
            (drawn.logprobs, wanted.logprobs),
            (drawn.entropies, wanted.entropies),
        ):
            off = float(np.abs(values - known)[is_same].max())
            if not off <= _FAR:
                return f"with {name} values differ from the reference's by {off:.2g} nats"
    if sampler.on_device:  # kernels that cannot be compiled have been given up meanwhile
        _agreed.add(key)
    return ""


def _logits(n_vocab: int) -> NDArray[np.float32]:
    """Return random logits for the check: float32 [_N_ROWS, V]."""
    random = np.random.default_rng(0)
    return random.standard_normal((_N_ROWS, n_vocab), np.float32) * np.float32(_SPREAD)


def _batch(logits: NDArray[np.float32], *, is_masked: bool = False, **rules: Any) -> DrawBatch:
    """Return samplers with these parameters, for all temperatures and rows.

    Penalties count the likeliest tokens.
    """
    matcher = _third_of(logits.shape[1]) if is_masked else None
    likeliest = logits.argmax(1).tolist()
    samplers = []
    for number in range(_N_SAMPLERS):
        temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
        params = SamplingParams(temperature=temperature, **rules)
        samplers.append(Sampler(params, 0x9E3779B97F4A7C15 * (number + 1) % (1 << 64), matcher))
        samplers[-1].add_generated(likeliest)
    numbers = np.arange(_N_SAMPLERS)
    rows = numbers // len(_TEMPERATURES) % _N_ROWS
    return DrawBatch(
        rows[::-1].copy(), BatchSampler(samplers), (numbers + _FIRST).astype(np.uint64)
    )


def _third_of(n_vocab: int) -> AllowMatcher:
    """Return a constraint that allows every third token."""
    allowed = np.zeros(n_words(n_vocab) * 32, np.uint8)
    allowed[:n_vocab:3] = 1
    return AllowMatcher(
        frozenset(range(0, n_vocab, 3)), np.packbits(allowed, bitorder="little").view(np.int32)
    )
