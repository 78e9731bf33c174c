"""Which activations modules are; GELU by a tanh that is written out, eight operations, as one of
PyTorch: in steps by kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Activation, KVStep
from .by_step import ask_step_first

_NEAR = 1e-6
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@torch.inference_mode()
def fuse_activations(model: nn.Module) -> int:
    """Let modules of our copy, which have seats, that compute just that do it at once; return how
    many do.
    """
    return ask_step_first(model, lambda module: _is_written_out(module) or None, _at_once)


def _at_once(_module: nn.Module, _step: KVStep, _form: bool, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _is_written_out(module: nn.Module) -> bool:
    """Whether it is of Transformers' activations, has nothing of its own, and does this."""
    kind = type(module)
    if kind.__module__ != "transformers.activations" or "forward" in module.__dict__:
        return False
    if module._parameters or module._buffers or module._modules:
        return False
    x = torch.linspace(-8, 8, 1001)
    try:
        made = kind.forward(module, x)
    except Exception:  # it takes more than numbers
        return False
    return torch.allclose(made, F.gelu(x, approximate="tanh"), rtol=_NEAR, atol=_NEAR)


def activation_of(module: Any) -> Activation | None:
    """Return which activation a module is, by what it makes of numbers; None: no such."""
    if not isinstance(module, nn.Module) or not is_bare(module):
        return None
    if [*module.parameters(), *module.buffers()]:
        return None
    x = torch.linspace(-20, 20, 2001)  # some are cut off far out
    try:
        made = type(module).forward(module, x)
    except Exception:
        return None
    for name, function in FUNCTIONS.items():
        if isinstance(made, Tensor) and torch.allclose(made, function(x), rtol=_NEAR, atol=_NEAR):
            return name
    return None


def is_bare(module: nn.Module) -> bool:
    """Whether a module has no hooks, nor a `forward` that somebody put in its place."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
