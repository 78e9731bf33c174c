"""Next-token log-probabilities for asyncio programs, batched automatically."""

from __future__ import annotations

from .asynclm import AbstractAsyncLM, AsyncLM, TopRows
from .factory import load_model_by_name

__all__ = ["AbstractAsyncLM", "AsyncLM", "TopRows", "load_model_by_name"]
