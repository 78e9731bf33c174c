"""The vLLM engine: vLLM's own asynchronous engine, on one device, several, or several machines."""

from __future__ import annotations

import importlib
import warnings

from ...errors import EngineUnavailable
from .log_filter import set_environment_defaults

set_environment_defaults()
try:
    with warnings.catch_warnings():  # deprecations in vLLM's dependencies
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.v1.engine.async_llm")
except ModuleNotFoundError:
    raise
except Exception as error:
    raise EngineUnavailable(
        f"vllm is installed but cannot be imported: {type(error).__name__}: {error}. If it names"
        " torchvision, torchaudio or torchcodec: pip uninstall those; text models do not need them"
    ) from error

# Importing vLLM reads the environment, so it comes last.
from .engine import VllmEngine  # noqa: E402

__all__ = ["VllmEngine"]
