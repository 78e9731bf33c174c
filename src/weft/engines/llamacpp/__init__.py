"""GGUF models by llama.cpp, through llama-cpp-python's plain C calls."""

from __future__ import annotations

from .engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
