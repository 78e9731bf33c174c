"""The mlx engine: decoder-only models of mlx-lm, on Apple silicon and on CPUs."""

from __future__ import annotations

from .engine import MlxEngine

__all__ = ["MlxEngine"]
