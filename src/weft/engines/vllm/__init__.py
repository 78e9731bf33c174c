"""The vLLM engine: vLLM's own asynchronous engine, on one device, several, or several machines."""

from __future__ import annotations

import importlib

from ...errors import EngineUnavailable
from .quiet import settle_environment

settle_environment()
try:
    importlib.import_module("vllm")
except ModuleNotFoundError:
    raise
except Exception as error:
    raise EngineUnavailable(
        f"vllm is installed and cannot be imported: {type(error).__name__}: {error}. Where it names"
        " torchvision, torchaudio or torchcodec: pip uninstall those, no text model needs them"
    ) from error

from .engine import VllmEngine

__all__ = ["VllmEngine"]
