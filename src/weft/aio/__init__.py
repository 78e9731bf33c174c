"""Next-token log-probabilities, awaited: batched by themselves, shared with every other face."""

from __future__ import annotations

from .asynclm import AsyncLM, load_model_by_name
from .base import AbstractAsyncLM, TopRows

__all__ = ["AbstractAsyncLM", "AsyncLM", "TopRows", "load_model_by_name"]
