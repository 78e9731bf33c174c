"""From a folder to a Transformers model; context length and fingerprint of a loaded one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...errors import ConfigError, EngineError, ModelLoadError, Unsupported
from .. import checkpoint
from .refuse import refuse_config
from .surgery import lay_by_column

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..source import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_NO_LIMIT = 1 << 20


def resolve_device(device: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:1" into a device that is there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r}"
        ) from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but PyTorch sees no CUDA device; use 'cpu'"
        )
    return place


def load_model(
    folder: Path,
    device: torch.device,
    dtype: str,
    *,
    trust_remote_code: bool,
    progress: Progress | None,
) -> tuple[PreTrainedModel, str]:
    """Load the folder's causal LM to `device`; return it and the fingerprint of its weights."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype must be 'auto', {', '.join(map(repr, DTYPES))}, not {dtype!r}")
    config = config_of(folder, trust_remote_code=trust_remote_code)
    stored = checkpoint.open_checkpoint(folder)
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(n_layers, int) and n_layers > len(stored.tensors):  # it would make them all first
        raise ModelLoadError(
            f"{folder / 'config.json'} says {n_layers} layers; the weights are "
            f"{len(stored.tensors)} tensors, less than one a layer"
        )
    if progress is not None:
        progress("load", 0, 1, str(folder))
    model = _from_pretrained(folder, config, dtype, trust_remote_code=trust_remote_code).to(device)
    lay_by_column(model)
    if progress is not None:
        progress("load", 1, 1, str(folder))
    try:
        return model, stored.fingerprint()
    except Unsupported:  # tensors in a quantised format
        return model, fingerprint_of(model)


def config_of(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return a folder's configuration, if this engine can run such a model; reads config.json."""
    checkpoint.read_config(folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        refuse_config(config)
    except EngineError:
        raise
    except Exception as error:  # values of a wrong kind raise all kinds of errors there
        raise ModelLoadError(
            f"Transformers does not know the model in {folder}: {error}"
        ) from error
    return config


def context_of(config: PretrainedConfig, n_ctx: int | None) -> int:
    """The longest path: `n_ctx` if given, else what the model was made for."""
    text: Any = config.get_text_config()
    known = next((int(v) for n in _CONTEXT_NAMES if (v := getattr(text, n, None))), _NO_LIMIT)
    if n_ctx is None:
        return known
    if not 1 <= n_ctx <= known:
        raise ConfigError(f"n_ctx must be 1 to {known}, the positions the model knows; got {n_ctx}")
    return n_ctx


def fingerprint_of(model: PreTrainedModel) -> str:
    """Name the weights of a loaded model; equal to its folder's fingerprint if the dtype is."""
    return checkpoint.fingerprint(model.config.to_dict(), _samples(model))


def _samples(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:  # tied weights are stored once
            seen.add(key)
            yield name, tuple(tensor.shape), _sample(tensor)


def _sample(tensor: Tensor) -> NDArray[np.float32]:
    positions = torch.from_numpy(checkpoint.sample_positions(tensor.numel())).to(tensor.device)
    sample: NDArray[np.float32] = tensor.detach().reshape(-1)[positions].float().cpu().numpy()
    return sample


def _from_pretrained(
    folder: Path, config: PretrainedConfig, dtype: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=DTYPES.get(dtype, "auto"),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except EngineError:
        raise
    except Exception as error:
        raise ModelLoadError(f"the model in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} tensors of a {type(model).__name__}, "
            f"{missing[0]!r} among them; download the folder again"
        )
    if model.dtype not in DTYPES.values():
        raise ConfigError(
            f"the checkpoint's dtype {model.dtype} is not one of {', '.join(DTYPES)}; give dtype="
        )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Transformers' progress bars and loading report off the terminal."""
    bars, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
