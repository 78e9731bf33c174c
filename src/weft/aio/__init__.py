"""Next-token log-probabilities, awaited: batched by themselves, shared with every other face."""

from __future__ import annotations

from .base import AsyncLM
from .loading import load_model_by_name
from .tree import TreeLM

__all__ = ["AsyncLM", "TreeLM", "load_model_by_name"]
