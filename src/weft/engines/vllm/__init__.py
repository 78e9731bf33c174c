"""The vLLM engine: vLLM's own asynchronous engine, on one device, several, or several machines."""

from __future__ import annotations

import importlib
import warnings

from ...errors import EngineUnavailable
from .log_filter import settle_environment

settle_environment()
try:
    with warnings.catch_warnings():  # of what vLLM stands on, to its developers
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.engine.async_llm")
except ModuleNotFoundError:
    raise
except Exception as error:
    raise EngineUnavailable(
        f"vllm is installed and cannot be imported: {type(error).__name__}: {error}. Where it names"
        " torchvision, torchaudio or torchcodec: pip uninstall those, no text model needs them"
    ) from error

# vLLM reads the environment as it is imported.
from .engine import VllmEngine  # noqa: E402

__all__ = ["VllmEngine"]
