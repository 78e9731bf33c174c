"""An engine's own copy of a model that its owner loaded, and goes on using."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import Unsupported

# Buffers up to this size are copied: rotary tables are small, and models rewrite them at run time.
_COPIED_BUFFER_BYTES = 1 << 20
# At its first forward RWKV divides weights of later layers, and bitsandbytes packs its own anew.
_REWRITERS = ("rwkv", "bitsandbytes")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy modules and config; parameters, hooks and the buffers that count as weights, or are
    large, stay shared with the owner.

    Not the weights of a model that rewrites its own as it runs: it would do so twice.

    Raises:
        Unsupported: something that hangs on the model cannot be copied.
    """
    shared: list[Any] = list(_hooks_of_others(model))
    if shares_weights(model):
        shared += model.parameters()
        shared += lasting_buffers(model)
        shared += (b for b in model.buffers() if b.nbytes > _COPIED_BUFFER_BYTES)
    memo = {id(each): each for each in shared}
    try:
        return copy.deepcopy(model, dict(memo)).eval()
    except Exception as error:
        name, where = type(model).__name__, _what_fails(model, memo)
        raise Unsupported(
            f"the torch engine runs a copy of the modules of a model that is handed over, its"
            f" weights shared, and this {name} cannot be copied{where}: {error!r}; take that"
            " off the model while it is handed over, or load the model's folder",
            hint="take what cannot be copied off the model, or load the model's folder",
        ) from error


def shares_weights(model: PreTrainedModel) -> bool:
    """Whether our copy of a model has the owner's own parameters."""
    named = (model.config.model_type, getattr(model, "quantization_method", None))
    return not any(name in _REWRITERS for name in named)


def lasting_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that are saved with the weights: biases of routers, an owner's vectors."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _hooks_of_others(model: PreTrainedModel) -> Iterator[Any]:
    """What an owner's hooks keep is the owner's; only hooks that are the model's own go along."""
    own = {id(module) for module in model.modules()}
    for module in model.modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if id(getattr(hook, "__self__", None)) not in own:
                    yield hook


def _what_fails(model: PreTrainedModel, memo: dict[int, Any]) -> str:
    """Return " for …", the attributes that hold what is not copied; "" where none alone does."""
    structure = set(vars(nn.Module()))
    failing = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in structure or isinstance(value, Tensor | nn.Module):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                failing.append(f"{path}.{name}".lstrip("."))
    return f" for what is in {', '.join(failing[:3])}" if failing else ""
