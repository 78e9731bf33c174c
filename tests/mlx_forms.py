"""The small model on MLX in other forms, for `pytest tests/contract --engine mlx_forms:FourBit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import load_model

from weft.engines.mlx import MlxEngine


class FourBit(MlxEngine):
    """Weights in 4 bits, computed in float32."""

    @classmethod
    def load(cls, folder: str | Path, **options: Any) -> MlxEngine:  # type: ignore[override]
        model, _ = load_model(Path(folder))
        model.set_dtype(mx.float32)
        nn.quantize(model, 64, 4)
        return MlxEngine.adopt(model, **options)


class Half(MlxEngine):
    """In bfloat16, as it is stored."""
