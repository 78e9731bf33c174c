"""An engine's own copy of the modules of a model that its user goes on using."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import Unsupported

# Larger buffers are shared. Rotary tables are smaller, and models rewrite them at run time.
_COPIED_BUFFER_BYTES = 1 << 20
# At its first forward, RWKV divides weights of later layers, and bitsandbytes repacks its own.
_REWRITERS = ("rwkv", "bitsandbytes")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def copy_sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy modules and config; share parameters, saved or large buffers, and the user's hooks.

    A model that rewrites its own weights while it runs is copied with its weights: two copies would
    rewrite shared ones twice.

    Raises:
        Unsupported: an attribute of the model cannot be copied.
    """
    shared: list[Any] = list(_hooks_of_user(model))
    if shares_weights(model):
        shared += model.parameters()
        shared += saved_buffers(model)
        shared += (b for b in model.buffers() if b.nbytes > _COPIED_BUFFER_BYTES)
    try:
        return copy.deepcopy(model, {id(part): part for part in shared}).eval()
    except Exception as error:
        raise Unsupported(
            f"the torch engine runs a copy of the modules of a loaded model, and this"
            f" {type(model).__name__} cannot be copied: {error!r}; remove the attribute that cannot"
            " be copied, or load the model's folder",
            hint="remove the attribute that cannot be copied, or load the model's folder",
        ) from error


def shares_weights(model: PreTrainedModel) -> bool:
    """Return True if the copy uses the user's own parameters."""
    names = (model.config.model_type, getattr(model, "quantization_method", None))
    return not any(name in _REWRITERS for name in names)


def saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that checkpoints contain, such as router biases."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _hooks_of_user(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the hooks that are not bound to a module of the model."""
    modules = {id(module) for module in model.modules()}
    for module in model.modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                if id(getattr(hook, "__self__", None)) not in modules:
                    yield hook
