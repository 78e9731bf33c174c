"""LoRA adapters: another shell around a model's parts, with layers that add low-rank outputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from safetensors import safe_open

from ..._core.atomic_files import read_json, repr_short
from ...errors import ConfigError, ModelLoadError, Unsupported
from ..peft import read_config, scale_of
from .model import shallow_copy_of

_PEFT = re.compile(r"^base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])\.weight$")
_OWN = re.compile(r"^(?P<path>.+)\.lora_(?P<half>[ab])$")


class LowRank(NamedTuple):
    """Low-rank addition to a layer's output: scale · (x down) up.

    Args:
        down: [in, r].
        up: [r, out].
        scale: factor of the addition.
    """

    down: mx.array
    up: mx.array
    scale: float


class LowRankLinear(nn.Module):
    """A linear layer of the model, quantised or not, with an adapter's addition."""

    def __init__(self, base: nn.Module, low: LowRank) -> None:
        super().__init__()
        self.base = base
        self.down, self.up, self.scale = low

    def __call__(self, x: mx.array) -> mx.array:
        more = (x @ self.down.astype(x.dtype)) @ self.up.astype(x.dtype)
        return self.base(x) + self.scale * more


def with_adapter(model: nn.Module, folder: Path) -> tuple[nn.Module, str]:
    """Return the model with an adapter, sharing all other parts, and the adapter's fingerprint.

    The model itself stays unchanged.

    Args:
        model: the model.
        folder: adapter in mlx-lm's format (adapters.safetensors) or PEFT's.

    Raises:
        ModelLoadError, Unsupported, ConfigError: the adapter is broken, not supported, or does not
            fit.
    """
    layers = read_low_ranks(folder)
    copy = copy_modules(model)
    for path, low in layers.items():
        _replace(copy, path, low, folder)
    return copy, fingerprint_low_ranks(layers)


def read_low_ranks(folder: Path) -> dict[str, LowRank]:
    """Return an adapter's layers by module path."""
    own = folder / "adapters.safetensors"
    halves: dict[str, dict[str, mx.array]] = {}
    config = _own_config(folder) if own.is_file() else read_config(folder)
    for path, half, array in _read_lora_matrices(
        own if own.is_file() else folder / "adapter_model.safetensors"
    ):
        halves.setdefault(path, {})[half] = array
    if not halves:
        raise ConfigError(f"the adapter in {folder} has no layers")
    layers = {}
    for path, pair in halves.items():
        if set(pair) == {"a", "b"}:
            scale = config["lora_parameters"]["scale"]
            layers[path] = LowRank(pair["a"], pair["b"], float(scale))
        elif set(pair) == {"A", "B"}:
            scale = scale_of(config, path, pair["A"].shape[0])
            layers[path] = LowRank(pair["A"].T, pair["B"].T, scale)
        else:
            raise ConfigError(f"the adapter in {folder} has only one half of {path}")
    mx.eval([(low.down, low.up) for low in layers.values()])
    return layers


def _own_config(folder: Path) -> Mapping[str, Any]:
    """Read mlx-lm's adapter_config.json. Raise Unsupported for anything but plain LoRA."""
    file = folder / "adapter_config.json"
    config = read_json(file, ModelLoadError, "not readable JSON", nan=True)
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} is a JSON {type(config).__name__}; it must be an object")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise Unsupported(
            f"the adapter in {folder} is of type {repr_short(kind)}; only plain LoRA is supported"
        )
    values = config.get("lora_parameters")
    scale = values.get("scale") if isinstance(values, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ModelLoadError(f"{file} has no number lora_parameters.scale")
    return config


def _read_lora_matrices(file: Path) -> Iterator[tuple[str, str, mx.array]]:
    """Yield (module path, half, matrix) for each stored matrix. half: "A" or "a" (down), "B" or "b"
    (up).

    Raises:
        ModelLoadError: the file is missing or broken.
        Unsupported: it contains something other than LoRA of linear layers.
    """
    if not file.is_file():
        raise ModelLoadError(
            f"{file.parent} is no adapter: it has neither adapters.safetensors (mlx-lm's) nor"
            " adapter_model.safetensors (PEFT's)"
        )
    try:
        with safe_open(str(file), "numpy"):  # MLX does not detect a truncated file
            arrays: Any = mx.load(str(file))
    except Exception as error:  # the libraries raise types of their own
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    for key, array in arrays.items():
        match = _PEFT.match(key) or _OWN.match(key)
        if match is None:
            raise Unsupported(f"{file} has {key}; only LoRA of linear layers is supported")
        yield match["path"], match["half"], array


def _replace(model: nn.Module, path: str, low: LowRank, folder: Path) -> None:
    """Replace the layer at `path` by a `LowRankLinear`.

    Raises:
        ConfigError, Unsupported: the model has no such linear layer. The message names `folder`.
    """
    above, _, name = path.rpartition(".")
    holder: Any = model
    for step in above.split(".") if above else ():
        is_index = isinstance(holder, list) and step.isdigit() and int(step) < len(holder)
        holder = holder[int(step)] if is_index else getattr(holder, step, None)
    base = getattr(holder, name, None)
    if not isinstance(base, nn.Module):
        raise ConfigError(f"the adapter in {folder} is of another model: it has no layer {path}")
    if not isinstance(base, nn.Linear | nn.QuantizedLinear):
        raise Unsupported(
            f"the adapter in {folder} changes {path}, a {type(base).__name__}; only linear layers"
            " are supported"
        )
    n_out, n_in = base.weight.shape
    if isinstance(base, nn.QuantizedLinear):
        n_in = n_in * 32 // base.bits
    if low.down.shape[:1] != (n_in,) or low.up.shape != (low.down.shape[-1], n_out):
        raise ConfigError(
            f"the adapter in {folder} is of another model: {path} maps {n_in} to {n_out} numbers,"
            f" the adapter has {tuple(low.down.shape)} and {tuple(low.up.shape)}"
        )
    setattr(holder, name, LowRankLinear(base, low))


def copy_modules(module: nn.Module) -> nn.Module:
    """Return a copy of a module and all modules below it, which share the original's arrays."""
    shell = shallow_copy_of(module)
    for key, value in module.items():
        dict.__setitem__(shell, key, _copy_value(value))
    return shell


def _copy_value(value: Any) -> Any:
    """Copy modules inside lists, tuples and dicts too; return other values unchanged."""
    if isinstance(value, nn.Module):
        return copy_modules(value)
    if isinstance(value, list | tuple):
        return type(value)(_copy_value(each) for each in value)
    if isinstance(value, dict):
        return {key: _copy_value(each) for key, each in value.items()}
    return value


def fingerprint_low_ranks(layers: Mapping[str, LowRank]) -> str:
    """Return a hash of an adapter's layers, equal to the other engines' for the same adapter."""
    digest = hashlib.blake2b(digest_size=8)
    for path, low in sorted(layers.items()):
        down, up = (np.array(half.T.astype(mx.float32), order="C") for half in (low.down, low.up))
        digest.update(f"{path} {low.scale!r} {down.shape}".encode())
        digest.update(down.tobytes())
        digest.update(up.tobytes())
    return digest.hexdigest()
