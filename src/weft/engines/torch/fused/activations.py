"""GELU by a tanh that is written out, eight operations, as one of PyTorch: in steps by kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import KVStep
from .by_step import ask_step_first

_NEAR = 1e-6


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
