"""`load_model_by_name`: load a model as an `AsyncLM`, by genlm's names of backends."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

from ..errors import ConfigError
from .asynclm import AsyncLM

if TYPE_CHECKING:
    from ..compat.genlm.models import MockAsyncLM

GENLM_BACKENDS = ("hf", "vllm", "mlx", "mock")
ASYNC_LM_OPTIONS = ("batch_size", "strict", "strict_bytes", "as_torch", "on_device")
_log = logging.getLogger(__name__)


@overload
def load_model_by_name(  # type: ignore[overload-overlap]  # "mock" is a str, too
    name: str, backend: Literal["mock"], llm_opts: Mapping[str, Any] | None = None
) -> MockAsyncLM: ...


@overload
def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM: ...


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM | MockAsyncLM:
    """Load a model and return its AsyncLM. Rows are tensors if torch is installed.

    Args:
        name: "tiny", a Hub id, a folder or a GGUF file, as for `weft.load`.
        backend: "hf", "vllm", "mlx" or "mock" of `weft.compat.genlm`, or one of Weft's engines.
            None: vllm if CUDA and vLLM are available, else hf; numpy for the embedded "tiny";
            for a GGUF file the engine that `weft.load` chooses.
        llm_opts: keywords of `from_name` of the class that the backend selects. For Weft's engines,
            keywords of `AsyncLM` and `weft.load`. None: none.

    Raises: ConfigError, a ValueError, for another backend.
    """
    from ..engines import engine_names

    if not isinstance(name, str | os.PathLike):
        raise ConfigError(
            f"name is of type {type(name).__name__}; allowed are a name and a folder. For a loaded"
            " model: AsyncLM(weft.load(model, tokenizer))"
        )
    options, engines = dict(llm_opts or {}), engine_names()
    chosen = backend if backend is not None else _choose_backend(name, engines, options)
    if chosen in GENLM_BACKENDS:
        from ..compat.genlm import BACKENDS

        model: AsyncLM | MockAsyncLM = BACKENDS[chosen].from_name(name, **options)
        return model
    if chosen not in ("auto", *engines):
        allowed = ", ".join((*GENLM_BACKENDS, "auto", *engines))
        raise ConfigError(f"Invalid backend: {chosen!r}; allowed are {allowed}")
    from ..loading import load

    own = {"as_torch": find_spec("torch") is not None}
    own |= {option: options.pop(option) for option in ASYNC_LM_OPTIONS if option in options}
    return AsyncLM(load(name, engine=chosen, **options), **own)


def _choose_backend(name: str, engines: tuple[str, ...], options: dict[str, Any]) -> str:
    """Choose the backend of a model for which the caller named none.

    "numpy" for the model "tiny", "auto" for a GGUF file, "vllm" if it is installed and CUDA is
    available, else "hf".

    Args:
        name: the model.
        engines: names of the available engines.
        options: the caller's options. vLLM's `engine_opts` are removed if another backend is
            chosen.
    """
    if name == "tiny":
        return "numpy"
    if os.fspath(name).lower().endswith(".gguf"):
        return "auto"
    if not _has_cuda():
        return "hf"
    if "vllm" in engines and find_spec("vllm") is not None:
        return "vllm"
    if options.pop("engine_opts", None):
        _log.warning("engine_opts are for vLLM, which is not installed; torch is used without")
    return "hf"


def _has_cuda() -> bool:
    """Return True if torch is installed and has a CUDA device."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
