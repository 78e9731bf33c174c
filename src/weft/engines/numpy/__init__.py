"""The NumPy engine: Llama-family models in float32; the reference of the engine protocol."""

from __future__ import annotations

from .engine import NumpyEngine

__all__ = ["NumpyEngine"]
