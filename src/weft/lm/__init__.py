"""A loaded model: `LM`, its results, statistics, KV interface and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy_getattr

__all__ = ["LM"]

if TYPE_CHECKING:
    from .lm import LM

__getattr__ = lazy_getattr(__name__, {"lm": "LM"})
