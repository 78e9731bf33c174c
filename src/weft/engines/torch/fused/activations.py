"""Recognise activations and gates by their results, and fuse tanh GELU into one operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kv_backend import Activation, AttentionStep, GatedActivation
from .patching import patch_forward

_NEAR = 1e-6
_SMALL, _LARGE = 0.25, 1e4  # below and above every gate's limit
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@torch.inference_mode()
def fuse_activations(model: nn.Module) -> int:
    """Patch modules that compute tanh GELU in many operations; return their number."""
    return patch_forward(model, lambda module: _is_written_out(module) or None, _run_tanh_gelu)


def _run_tanh_gelu(_module: nn.Module, _step: AttentionStep, _form: bool, x: Tensor) -> Tensor:
    """Compute tanh GELU in one operation."""
    return F.gelu(x, approximate="tanh")


def _is_written_out(module: nn.Module) -> bool:
    """Return True for an activation module that computes tanh GELU in several operations."""
    kind = type(module)
    if kind.__module__ != "transformers.activations" or "forward" in module.__dict__:
        return False
    if module._parameters or module._buffers or module._modules:
        return False
    x = torch.linspace(-8, 8, 1001)
    try:
        result = kind.forward(module, x)
    except Exception:  # it needs other inputs
        return False
    return torch.allclose(result, F.gelu(x, approximate="tanh"), rtol=_NEAR, atol=_NEAR)


def activation_of(module: Any) -> Activation | None:
    """Run a module on numbers; return the known activation that it computes, or None."""
    if not isinstance(module, nn.Module) or not is_bare(module):
        return None
    if [*module.parameters(), *module.buffers()]:
        return None
    x = torch.linspace(-20, 20, 2001)  # some activations are clamped far out
    try:
        result = type(module).forward(module, x)
    except Exception:
        return None
    for name, function in FUNCTIONS.items():
        if isinstance(result, Tensor) and torch.allclose(
            result, function(x), rtol=_NEAR, atol=_NEAR
        ):
            return name
    return None


def gated(gate: GatedActivation, both: Tensor) -> Tensor:
    """Apply a gated activation to rows that contain gates and ups: [..., 2 I] → [..., I]."""
    gates, ups = (
        both.unflatten(-1, (-1, 2)).unbind(-1) if gate.are_neighbours else both.chunk(2, -1)
    )
    if gate.limit is not None:
        gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    result = FUNCTIONS[gate.activation](gates * gate.slope) / gate.slope
    return result * (ups + gate.shift)


def gate_of(function: Callable[[Tensor], Tensor]) -> GatedActivation | None:
    """Return the gated activation that a function of rows [n, 2 I] computes, or None."""
    gates = torch.linspace(-20, 20, 401).double().repeat(6)
    ups = torch.tensor([-1e3, -3.0, -0.5, 0.5, 3.0, 1e3]).double().repeat_interleave(401)
    size = ups.abs() + 1
    try:
        for are_neighbours in (False, True):
            rows = _interleave(gates, ups, are_neighbours=are_neighbours)
            result = function(rows).double() / size
            for gate in _gates_like(function, are_neighbours=are_neighbours):
                if torch.allclose(result, gated(gate, rows) / size, rtol=_NEAR, atol=_NEAR):
                    return gate
    except Exception:  # it needs other inputs
        return None
    return None


def _gates_like(
    function: Callable[[Tensor], Tensor], *, are_neighbours: bool
) -> list[GatedActivation]:
    """Guess a function's gated activation from its results for three rows; return the candidates.

    are_neighbours: gates and ups alternate in a row; else gates are the first half.
    """
    ups = torch.tensor([0.0, _SMALL, _LARGE]).double()
    rows = _interleave(torch.full_like(ups, _SMALL), ups, are_neighbours=are_neighbours)
    at_0, at_small, at_large = function(rows).double().flatten().tolist()
    activation_value = (at_small - at_0) / _SMALL
    share = activation_value / _SMALL
    if not 0 < share < 1:
        return []
    slope = _short((math.log(share) - math.log1p(-share)) / _SMALL)
    shift = _short(at_0 / activation_value)
    reach = _short(at_large / activation_value) - shift
    limit = _short(reach) if reach < _LARGE / 2 else None
    slopes: list[tuple[Activation, float]] = [("silu", slope), ("gelu", 1.0), ("gelu_tanh", 1.0)]
    return [
        GatedActivation(name, limit, each, shift, are_neighbours) for name, each in slopes if each
    ]


def _interleave(gates: Tensor, ups: Tensor, *, are_neighbours: bool) -> Tensor:
    """Return one row of gates and ups, alternating if `are_neighbours`: [1, 2 n]."""
    return torch.stack((gates, ups), -1 if are_neighbours else 0).reshape(1, -1)


def _short(number: float) -> float:
    """Round a measured constant to the few digits that source code would have."""
    return float(f"{number:.5g}")


def is_bare(module: nn.Module) -> bool:
    """Return True if a module has no hooks and no replaced `forward`."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
