"""Engine that runs GGUF models with llama.cpp, through the C API of llama-cpp-python."""

from __future__ import annotations

from .engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
