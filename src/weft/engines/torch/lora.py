"""LoRA adapters beside a model: added to the outputs of its layers, never merged into them."""

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
    """What one layer's output gets more: scale · B(A x). down: [r, in]; up: [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


class LoraAdapters:
    """The adapters of one engine's model, by name; `active` is that of the forward under way.

    A layer is hooked when the first adapter needs it; without an active one its output stays.
    """

    def __init__(self, model: nn.Module) -> None:
        self.active: str | None = None
        self._modules = dict(model.named_modules())
        self._layers: dict[str, dict[str, LoraLayer]] = {}
        self._hooked: set[str] = set()

    @property
    def n_hooks(self) -> int:
        """How many hooks it has put on the model's modules."""
        return len(self._hooked)

    def add(self, name: str, folder: str | Path) -> str:
        """Read a PEFT folder; return a fingerprint of what its layers add.

        Raises: ModelLoadError, Unsupported, ConfigError; nothing changes then.
        """
        layers = read_adapter(Path(folder), self._modules)
        for path in layers.keys() - self._hooked:
            self._modules[path].register_forward_hook(self._hook(path))
            self._hooked.add(path)
        self._layers[name] = layers
        return fingerprint_of(layers)

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self._layers.pop(name, None)

    def use(self, name: str | None) -> None:
        """Say whose the next forward is. Raises: StaleHandle for an adapter that was removed."""
        if name is not None and name not in self._layers:
            raise StaleHandle(
                f"the LoRA adapter {name.rpartition('#')[0]!r} was removed; add it again"
            )
        self.active = name

    def _hook(self, path: str) -> Any:
        def add_low(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            low = self._layers[self.active].get(path) if self.active is not None else None
            if low is None:
                return output
            x = inputs[0]
            more = x @ low.down.to(x.dtype).T @ low.up.to(x.dtype).T
            return output + low.scale * more

        setattr(add_low, KEEPS_INPUT, True)
        return add_low


def read_adapter(folder: Path, modules: Mapping[str, nn.Module]) -> dict[str, LoraLayer]:
    """Return an adapter's layers by module path, on the model's device and in its dtype."""
    config = read_config(folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_weights(folder).items():
        found = _KEY.match(key)
        if found is not None:
            halves.setdefault(found["module"], {})[found["half"]] = tensor
        elif not is_own_weight(key, tensor, modules):
            raise Unsupported(
                f"the adapter in {folder} has {key}; only lora_A and lora_B beside the model's own"
                " weights are run"
            )
    if not halves:
        raise ConfigError(f"the adapter in {folder} has no layers")
    layers = {}
    for path, pair in halves.items():
        weight = weight_for(path, pair, folder, modules)
        # What stands for a quantised weight's numbers may be bytes.
        dtype = weight.dtype if weight.dtype.itemsize > 1 else None
        down, up = (pair[half].to(weight.device, dtype) for half in "AB")
        layers[path] = LoraLayer(down, up, scale_of(config, path, down.shape[0]))
    return layers


def weight_for(
    path: str, pair: Mapping[str, Tensor], folder: Path, modules: Mapping[str, nn.Module]
) -> Tensor:
    """Return the weight of the layer that two halves are for. Raises: ConfigError, Unsupported."""
    module = modules.get(path)
    if module is None or set(pair) != {"A", "B"}:
        raise ConfigError(f"the adapter in {folder} is of another model: it has no layer {path}")
    if not isinstance(module, nn.Linear | Conv1D):
        raise Unsupported(
            f"the adapter in {folder} changes {path}, a {type(module).__name__}; LoRA is run on"
            " linear layers"
        )
    down, up, weight = pair["A"], pair["B"], module.weight
    shape = weight.shape[::-1]
    if isinstance(module, nn.Linear):  # a quantised weight may be of any shape
        shape = module.out_features, module.in_features
    n_out, n_in = shape
    if down.shape[1:] != (n_in,) or up.shape != (n_out, down.shape[0]):
        raise ConfigError(
            f"the adapter in {folder} is of another model: {path} takes {n_in} to {n_out} numbers,"
            f" the adapter has {tuple(down.shape)} and {tuple(up.shape)}"
        )
    return weight


def is_own_weight(key: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> bool:
    """Whether this is the model's own weight, which PEFT saves beside an adapted output layer."""
    found = _BASE.match(key)
    weight = getattr(modules.get(found["module"]), "weight", None) if found is not None else None
    if not isinstance(weight, Tensor) or weight.shape != tensor.shape:
        return False
    return torch.equal(tensor.to(weight.device, weight.dtype), weight)


def fingerprint_of(layers: Mapping[str, LoraLayer]) -> str:
    """Return a hash of what an adapter adds, equal wherever it is run in one dtype."""
    digest = hashlib.blake2b(digest_size=8)
    for path, low in sorted(layers.items()):
        digest.update(f"{path} {low.scale!r} {tuple(low.down.shape)}".encode())
        for half in (low.down, low.up):
            digest.update(half.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return adapter_model.safetensors. Raises: ModelLoadError."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelLoadError(f"{folder} is no PEFT adapter: it has no file {file.name}")
    try:
        tensors: dict[str, Tensor] = load_file(str(file))
    except Exception as error:  # the library raises kinds of its own
        raise ModelLoadError(f"{file} cannot be read: {error}; save it as safetensors") from error
    return tensors
