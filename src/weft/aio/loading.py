"""`load_model_by_name`: an `AsyncLM` from a model's name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .base import AsyncLM

KNOWN = ("hf", "vllm", "mlx", "mock")


def load_model_by_name(
    name: str, backend: str | None = None, llm_opts: Mapping[str, Any] | None = None
) -> AsyncLM:
    """Load a model and return its AsyncLM.

    backend: "hf", "vllm", "mlx" or "mock", with that class's options (`weft.compat.genlm`); or an
    engine of Weft's, with the options of `weft.load`. None: vllm where CUDA and vLLM are, else hf;
    for the embedded "tiny" the numpy engine. Raises: ValueError for another backend.
    """
    from ..engines import engine_names

    options = dict(llm_opts or {})
    chosen = backend if backend is not None else _best(name)
    if chosen in KNOWN:
        made: AsyncLM = _known(chosen).from_name(name, **options)
        return made
    if chosen not in ("auto", *engine_names()):
        allowed = ", ".join((*KNOWN, "auto", *engine_names()))
        raise ConfigError(f"Invalid backend: {chosen!r}; allowed are {allowed}")
    from ..loading import load
    from .tree import TreeLM

    return TreeLM(load(name, engine=chosen, **options))


def _known(backend: str) -> Any:
    from ..compat.genlm import mock, wrappers

    return {
        "hf": wrappers.AsyncTransformer,
        "vllm": wrappers.AsyncVirtualLM,
        "mlx": wrappers.AsyncMlxLM,
        "mock": mock.MockAsyncLM,
    }[backend]


def _best(name: str) -> str:
    if name == "tiny":
        return "numpy"
    return "vllm" if find_spec("vllm") is not None and _has_cuda() else "hf"


def _has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
