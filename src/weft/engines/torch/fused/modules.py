"""Fused kernels inside a model's own modules, if they are of a known kind."""

from __future__ import annotations

import torch
from torch import nn

from ..attention_hook import ForwardContext
from .activations import fuse_activations
from .experts import fuse_experts
from .gates import fuse_gates
from .merged_linear import fuse_siblings
from .norms import fuse_norms
from .rotary import fuse_rotary
from .routers import fuse_routers


def fuse_modules(model: nn.Module, call: ForwardContext, dtype: torch.dtype) -> None:
    """Patch modules of the engine's copy to use one kernel or product instead of several
    operations.

    Modules that compute something else stay unchanged.

    Args:
        call: the model's `ForwardContext`.
        dtype: of hidden states.
    """
    fuse_siblings(model)
    fuse_norms(model, dtype)
    fuse_rotary(model, call, dtype)
    fuse_activations(model)
    fuse_gates(model, dtype)
    fuse_routers(model, dtype)
    fuse_experts(model, dtype)
