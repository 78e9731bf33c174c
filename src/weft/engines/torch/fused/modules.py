"""A model's own modules with few kernels a step, as far as they are of a known kind."""

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
    """Let modules of our copy, which have seats, do in one kernel or product what they do in
    several, in steps that have such kernels. What does something else stays as it is.

    call: that of the seats. dtype: of hidden states.
    """
    fuse_siblings(model)
    fuse_norms(model, dtype)
    fuse_rotary(model, call, dtype)
    fuse_activations(model)
    fuse_gates(model, dtype)
    fuse_routers(model, dtype)
    fuse_experts(model, dtype)
