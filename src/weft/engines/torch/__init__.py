"""The torch engine: decoder-only Transformers models on CPU or CUDA."""

from __future__ import annotations

from .engine import TorchEngine

__all__ = ["TorchEngine"]
