"""Experts of a mixture as four kernels instead of about 22."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kv_backend import AttentionStep, GatedActivation, MoEWeights
from ..weights.experts import first_stack_name, is_grouped, is_replaceable, is_stack, swap_layout
from .activations import gate_of, gated, is_bare
from .patching import patch_forward
from .probing import DTYPES, is_near, rows_of_sizes

_N_CHOSEN = 2  # experts a row in the check


class _ExpertOps(NamedTuple):
    """Operations of a mixture-of-experts module, so that the step's kernels can replace them."""

    up: str  # name of the first weights
    gate: GatedActivation | None  # None: the module's own code runs between the products
    act: Any  # the activation at the time of the check
    dtype: torch.dtype  # input dtype of the check

    def experts(self, module: Any) -> MoEWeights | None:
        """Return the module's current weights; None if they or the activation were replaced."""
        parameters = module._parameters
        up, down = parameters.get(self.up), parameters.get("down_proj")
        if not (is_stack(up) and is_stack(down)):
            return None
        between = None
        if self.gate is None:
            between = module._apply_gate if module.has_gate else module.act_fn
        elif getattr(module, "act_fn", None) is not self.act or "_apply_gate" in module.__dict__:
            return None
        elif isinstance(self.act, nn.Module) and not is_bare(self.act):
            return None
        return MoEWeights(
            swap_layout(module, up),
            swap_layout(module, down),
            parameters.get(f"{self.up}_bias"),
            parameters.get("down_proj_bias"),
            self.gate,
            between,
            is_grouped(module),
        )


@torch.inference_mode()
def fuse_experts(model: nn.Module, dtype: torch.dtype) -> int:
    """Patch modules of experts; return their number. dtype: of their inputs."""
    return patch_forward(
        model, lambda module: _recognize(module, dtype), _run_experts, n_inputs=(3,)
    )


def _run_experts(
    module: nn.Module,
    step: AttentionStep,
    form: _ExpertOps,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> Tensor | None:
    """Run a module of experts by the step's kernels; None: the module's own code must run.

    x: [T, E]. chosen, shares: expert ids and weights, [T, k].
    """
    experts = form.experts(module) if x.dtype == form.dtype else None
    if experts is None or not step.supports_fused_experts(x, chosen, shares, experts):
        return None
    return step.fused_experts(x, chosen, shares, experts)


def _recognize(module: Any, dtype: torch.dtype) -> _ExpertOps | None:
    """Return what a module of experts computes, verified by running it.

    None unless it computes two products per expert and the weighted sum. dtype: of its inputs.
    """
    if not is_replaceable(module) or dtype not in DTYPES or "forward" in module.__dict__:
        return None
    if module.__dict__.get("has_post_expert_norm") or module._parameters["down_proj"].is_meta:
        return None
    gate = gate_of(module._apply_gate) if module.has_gate else None
    for candidate in (gate, None) if gate else (None,):
        form = _ExpertOps(
            first_stack_name(module), candidate, getattr(module, "act_fn", None), dtype
        )
        if _matches(module, form):
            return form
    return None


def _matches(module: Any, form: _ExpertOps) -> bool:
    """Run a module of experts and a description of it; return True if the results are equal."""
    experts = form.experts(module)
    if experts is None:
        return False
    x = rows_of_sizes(experts.down.shape[1], experts.down.device, form.dtype)
    numbers = torch.arange(len(x) * _N_CHOSEN, device=x.device).view(-1, _N_CHOSEN)
    chosen = numbers % len(experts.down)
    shares = ((numbers + 1) / numbers.numel()).to(x.dtype)
    try:
        result = type(module).forward(module, x, chosen, shares)
        want = _reference(x, chosen, shares, experts)
    except Exception:  # other shapes, or it needs other inputs
        return False
    return is_near(result, want, form.dtype)


def _reference(x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights) -> Tensor:
    """Return the experts' weighted outputs [T, E] by plain operations, to verify a module."""
    ids = chosen.flatten().tolist()
    ups = _products(x.repeat_interleave(chosen.shape[1], 0), experts.up, experts.up_bias, ids)
    if experts.gate is not None:
        between = gated(experts.gate, ups)
    else:
        assert experts.between is not None
        between = experts.between(ups)
    result = _products(between, experts.down, experts.down_bias, ids)
    return (result * shares.view(-1, 1)).view(*chosen.shape, -1).sum(1)


def _products(rows: Tensor, weight: Tensor, bias: Tensor | None, ids: list[int]) -> Tensor:
    """Return the product of each row with its expert's weight."""
    result = [
        F.linear(row, weight[n], None if bias is None else bias[n])
        for row, n in zip(rows, ids, strict=True)
    ]
    return torch.stack(result)
