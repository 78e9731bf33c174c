"""LoRA adapters beside a model: added to the outputs of its layers, never merged into them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import ConfigError, ModelLoadError, StaleHandle, Unsupported

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight$")


class Low(NamedTuple):
    """What one layer's output gets more: scale · B(A x). down: [r, in]; up: [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


class Adapters:
    """The adapters of one engine's model, by name; `active` is that of the forward under way.

    A layer is hooked when the first adapter needs it; without an active one its output stays.
    """

    def __init__(self, model: nn.Module) -> None:
        self.active: str | None = None
        self._modules = dict(model.named_modules())
        self._layers: dict[str, dict[str, Low]] = {}
        self._hooked: set[str] = set()

    def add(self, name: str, folder: str | Path) -> None:
        """Read a PEFT folder. Raises: ModelLoadError, Unsupported, ConfigError; nothing changes."""
        layers = read_adapter(Path(folder), self._modules)
        for path in layers.keys() - self._hooked:
            self._modules[path].register_forward_hook(self._hook(path))
            self._hooked.add(path)
        self._layers[name] = layers

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
            return output + low.scale * (inputs[0] @ low.down.T @ low.up.T)

        return add_low


def read_adapter(folder: Path, modules: Mapping[str, nn.Module]) -> dict[str, Low]:
    """Return an adapter's layers by module path, on the model's device and in its dtype."""
    config = read_config(folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_weights(folder).items():
        found = _KEY.match(key)
        if found is None:
            raise Unsupported(f"the adapter in {folder} has {key}; only lora_A and lora_B are run")
        halves.setdefault(found["module"], {})[found["half"]] = tensor
    layers = {}
    for path, pair in halves.items():
        module = modules.get(path)
        weight = getattr(module, "weight", None)
        if module is None or weight is None or set(pair) != {"A", "B"}:
            raise ConfigError(
                f"the adapter in {folder} is of another model: it has no layer {path}"
            )
        down, up = (pair[half].to(weight.device, weight.dtype) for half in "AB")
        sizes = sorted((down.shape[1], up.shape[0]))
        if sizes != sorted(weight.shape) or down.shape[0] != up.shape[1]:
            raise ConfigError(
                f"the adapter in {folder} is of another model: {path} takes {tuple(weight.shape)},"
                f" the adapter has {tuple(down.shape)} and {tuple(up.shape)}"
            )
        layers[path] = Low(down, up, scale_of(config, path, down.shape[0]))
    if not layers:
        raise ConfigError(f"the adapter in {folder} has no layers")
    return layers


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. Raises: ModelLoadError, Unsupported naming what is not run."""
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{folder} is no PEFT adapter: adapter_config.json cannot be read: {error}"
        ) from error
    if config.get("peft_type") != "LORA":
        raise Unsupported(f"adapters of type {config.get('peft_type')} are not run; LORA is")
    for name in ("use_dora", "use_qalora", "modules_to_save", "trainable_token_indices"):
        if config.get(name):
            raise Unsupported(f"the adapter in {folder} has {name}; plain LoRA is run")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise Unsupported(f"the adapter in {folder} has biases; bias='none' is run")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return adapter_model.safetensors. Raises: ModelLoadError."""
    file = folder / "adapter_model.safetensors"
    try:
        tensors: dict[str, Tensor] = load_file(str(file))
    except Exception as error:  # the library raises kinds of its own
        raise ModelLoadError(f"{file} cannot be read: {error}; save it as safetensors") from error
    return tensors


def scale_of(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Return what a layer's low-rank output is multiplied by."""
    alpha = config.get("lora_alpha", rank)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = own
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
