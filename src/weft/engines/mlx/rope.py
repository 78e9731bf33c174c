"""Rotary parameters that mlx-lm's modules have no argument for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn

# Attributes of mlx-lm's YarnRoPE and SuScaledRoPE; the family tests fail if they are renamed.
_FREQUENCIES, _SCALE = "_freqs", "_scale"


def complete_rope(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Apply `attention_factor` and `truncate` of a config.json to a model's rotary embeddings.

    mlx-lm ignores both; for example, GPT-OSS has `truncate: false`.
    """
    text = config.get("text_config")
    level = {**config, **(text if isinstance(text, Mapping) else {})}
    rope = level.get("rope_parameters") or level.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return
    rope = {"rope_theta": level.get("rope_theta", 10000.0), **rope}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("attention_factor")
    for module in model.modules():
        name = type(module).__name__
        if kind == "yarn" and name == "YarnRoPE":
            if factor is not None:
                module.mscale = factor
            if rope.get("truncate") is False:
                setattr(module, _FREQUENCIES, _yarn_wavelengths(module.dims, rope, level))
        elif kind == "longrope" and name == "SuScaledRoPE" and factor is not None:
            setattr(module, _SCALE, factor)


def _yarn_wavelengths(n_dims: int, rope: Mapping[str, Any], level: Mapping[str, Any]) -> mx.array:
    """Return YaRN's wavelengths / 2 pi with a range that is not rounded: float32 [D/2]."""
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    original = rope.get("original_max_position_embeddings") or level["max_position_embeddings"]

    def dimension(n_rotations: float) -> float:
        wavelengths = math.log(original / (n_rotations * 2 * math.pi))
        return n_dims * wavelengths / (2 * math.log(base))

    low = max(dimension(rope.get("beta_fast") or 32), 0)
    high = min(dimension(rope.get("beta_slow") or 1), n_dims - 1)
    if low == high:
        high += 0.001
    plain = base ** (mx.arange(0, n_dims, 2, dtype=mx.float32) / n_dims)
    ramp = (mx.arange(n_dims // 2, dtype=mx.float32) - low) / (high - low)
    keep = 1 - mx.clip(ramp, 0, 1)
    return 1 / ((1 - keep) / (factor * plain) + keep / plain)
