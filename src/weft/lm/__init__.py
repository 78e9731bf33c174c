"""A loaded model: `LM`, its results, statistics, KV interface and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.doors import lazily

__all__ = ["LM"]

if TYPE_CHECKING:
    from .lm import LM

__getattr__ = lazily(__name__, {"lm": "LM"})
