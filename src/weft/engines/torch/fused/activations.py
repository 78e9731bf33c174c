"""GELU by a tanh that is written out, eight operations, as one of PyTorch: in steps by kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hook import step_of

_NEAR = 1e-6


@torch.inference_mode()
def fuse_activations(model: nn.Module) -> int:
    """Let modules of our copy, which have seats, that compute just that do it at once; return how
    many do.
    """
    n = 0
    for module in model.modules():
        if _is_written_out(module):
            kind: Any = type(module)
            module.__class__ = _at_once(kind)
            n += 1
    return n


@cache
def _at_once(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor) -> Any:
        step = step_of(self)
        if step is None or not step.turns:
            return kind.forward(self, x)
        return F.gelu(x, approximate="tanh")

    return type(f"{kind.__name__}AtOnce", (kind,), {"forward": forward, "__module__": __name__})


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
