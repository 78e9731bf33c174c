"""Quantised Transformers models, and engines over them for `pytest tests/contract --engine`.

`--engine quantised:Int8Weights` shows every law on torchao's weight-only int8.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# name: (the package it needs, the largest absolute difference of logits that reach about 4 from
# the quantised model's own plain forward). Where activations are quantised too, a last bit of one
# may become a full step of its grid.
KINDS: dict[str, tuple[str, float]] = {
    "torchao int8 weights": ("torchao", 1e-4),
    "torchao int8 weights and activations": ("torchao", 0.25),
    "bitsandbytes 8 bit": ("bitsandbytes", 0.25),
    "bitsandbytes 4 bit": ("bitsandbytes", 1e-3),
}


def config_of(kind: str) -> Any:
    """Transformers' configuration of a kind; skips where its package is not installed."""
    package = KINDS[kind][0]
    for needed in (package, "accelerate"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    import torch
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package == "torchao":
        from torchao import quantization

        name = "Int8DynamicActivationInt8WeightConfig" if "and" in kind else "Int8WeightOnlyConfig"
        return TorchAoConfig(getattr(quantization, name)())
    if "8" in kind:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


class Int8Weights:
    """A factory as an engine class is one."""

    @classmethod
    def load(cls, folder: str | Path) -> Any:
        """The torch engine over a folder's model, its weights int8."""
        from weft.engines.torch import TorchEngine

        config = config_of("torchao int8 weights")
        return TorchEngine.load(folder, dtype="float32", quantization_config=config)
