"""LoRA adapters whose output is added to a model's layers; weights are never merged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...errors import ConfigError, ModelLoadError, StaleHandle, Unsupported
from ..peft import read_config, scale_of
from .module_hooks import KEEPS_INPUT

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight$")
_BASE = re.compile(r"^base_model\.model\.(?P<module>.+?)(\.base_layer)?\.weight$")


class LoraLayer(NamedTuple):
    """One layer of a LoRA adapter, which adds scale · B(A x). down: A, [r, in]; up: B, [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


class LoraAdapters:
    """LoRA adapters of one engine's model, by name. `active` belongs to the running forward.

    A layer gets a hook when the first adapter needs it. Without an active adapter the hook adds
    nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.active: str | None = None
        self._modules = dict(model.named_modules())
        self._layers: dict[str, dict[str, LoraLayer]] = {}
        self._hooked: set[str] = set()

    @property
    def n_hooks(self) -> int:
        """Number of hooks on the model's modules."""
        return len(self._hooked)

    def add(self, name: str, folder: str | Path) -> str:
        """Read a PEFT folder; return a fingerprint of its layers.

        Raises: ModelLoadError, Unsupported, ConfigError; nothing has changed then.
        """
        layers = read_adapter(Path(folder), self._modules)
        for path in layers.keys() - self._hooked:
            self._modules[path].register_forward_hook(self._hook(path))
            self._hooked.add(path)
        self._layers[name] = layers
        return fingerprint_of(layers)

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        self._layers.pop(name, None)

    def use(self, name: str | None) -> None:
        """Select the adapter of the next forward. Raises: StaleHandle for a removed adapter."""
        if name is not None and name not in self._layers:
            raise StaleHandle(
                f"the LoRA adapter {name.rpartition('#')[0]!r} was removed; add it again"
            )
        self.active = name

    def _hook(self, path: str) -> Any:
        """Return a forward hook that adds the active adapter's output to the layer at `path`."""

        def add_lora(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            lora = self._layers[self.active].get(path) if self.active is not None else None
            if lora is None:
                return output
            x = inputs[0]
            return output + lora.scale * (x @ lora.down.to(x.dtype).T @ lora.up.to(x.dtype).T)

        setattr(add_lora, KEEPS_INPUT, True)
        return add_lora


def read_adapter(folder: Path, modules: Mapping[str, nn.Module]) -> dict[str, LoraLayer]:
    """Return an adapter's layers by module path, on the model's device and in its dtype."""
    config = read_config(folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_weights(folder).items():
        match = _KEY.match(key)
        if match is not None:
            halves.setdefault(match["module"], {})[match["half"]] = tensor
        elif not is_own_weight(key, tensor, modules):
            raise Unsupported(
                f"the adapter in {folder} has {key}; allowed are lora_A, lora_B and the model's own"
                " weights"
            )
    if not halves:
        raise ConfigError(f"the adapter in {folder} has no layers")
    layers = {}
    for path, pair in halves.items():
        weight = weight_for(path, pair, folder, modules)
        # A quantised weight may be stored as bytes.
        dtype = weight.dtype if weight.dtype.itemsize > 1 else None
        down, up = (pair[half].to(weight.device, dtype) for half in "AB")
        layers[path] = LoraLayer(down, up, scale_of(config, path, down.shape[0]))
    return layers


def weight_for(
    path: str, pair: Mapping[str, Tensor], folder: Path, modules: Mapping[str, nn.Module]
) -> Tensor:
    """Return the weight of the layer that an adapter's A and B belong to.

    Raises: ConfigError, Unsupported.
    """
    module = modules.get(path)
    if module is None or set(pair) != {"A", "B"}:
        raise ConfigError(f"the adapter in {folder} is of another model: it has no layer {path}")
    if not isinstance(module, nn.Linear | Conv1D):
        raise Unsupported(
            f"the adapter in {folder} changes {path}, a {type(module).__name__}; allowed are linear"
            " layers"
        )
    down, up, weight = pair["A"], pair["B"], module.weight
    shape = weight.shape[::-1]
    if isinstance(module, nn.Linear):  # a quantised weight may be of any shape
        shape = module.out_features, module.in_features
    n_out, n_in = shape
    if down.shape[1:] != (n_in,) or up.shape != (n_out, down.shape[0]):
        raise ConfigError(
            f"the adapter in {folder} is of another model: {path} maps {n_in} to {n_out} numbers,"
            f" the adapter has {tuple(down.shape)} and {tuple(up.shape)}"
        )
    return weight


def is_own_weight(key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if a tensor in an adapter's file equals a weight of the model.

    PEFT saves the base weight, too, for an adapted output layer.

    Args:
        key: name of the tensor in the file.
        tensor: its values.
        modules: the model's modules by path.
    """
    match = _BASE.match(key)
    weight = getattr(modules.get(match["module"]), "weight", None) if match is not None else None
    if not isinstance(weight, Tensor) or weight.shape != tensor.shape:
        return False
    return torch.equal(tensor.to(weight.device, weight.dtype), weight)


def fingerprint_of(layers: Mapping[str, LoraLayer]) -> str:
    """Return a hash of an adapter's layers, equal on every machine for one dtype."""
    digest = hashlib.blake2b(digest_size=8)
    for path, lora in sorted(layers.items()):
        digest.update(f"{path} {lora.scale!r} {tuple(lora.down.shape)}".encode())
        for half in (lora.down, lora.up):
            digest.update(half.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return adapter_model.safetensors. Raises: ModelLoadError."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelLoadError(f"{folder} is no PEFT adapter: it has no file {file.name}")
    try:
        tensors: dict[str, Tensor] = load_file(str(file))
    except Exception as error:  # safetensors has its own exception classes
        raise ModelLoadError(f"{file} cannot be read: {error}; save it as safetensors") from error
    return tensors
