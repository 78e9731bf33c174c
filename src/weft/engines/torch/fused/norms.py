"""RMS norms of a model's own modules as one kernel each.

Transformers writes a norm as six to nine operations, each a kernel launch on a GPU, and a layer has
two to six norms.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kv_backend import AttentionStep
from .patching import patch_forward
from .probing import DTYPES

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_WIDTH = 256  # of rows in the check of a norm without weight
# (scale, mean) of rows in the check. Small rows show eps.
_SIZES = ((1.0, 0.0), (30.0, 0.0), (1.0, 3.0), (1e-3, 0.0))


class _NormFormula(NamedTuple):
    """Formula of an RMS norm: x / sqrt(mean(x²) + eps) * (weight + shift)."""

    eps: str  # attribute name
    shift: float
    is_centred: bool  # subtract the mean first
    dtype: torch.dtype  # input dtype of the check


@torch.inference_mode()
def fuse_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Patch norms; return their number. dtype: of their inputs."""
    return patch_forward(model, lambda module: _recognize(module, dtype), _run_norm)


def _run_norm(norm: nn.Module, step: AttentionStep, form: _NormFormula, x: Tensor) -> Tensor | None:
    """Run a norm by the step's kernel; None: the module's own code must run."""
    weight: Any = norm._parameters.get("weight")
    if x.dtype != form.dtype or not step.supports_rms_norm(x, weight):
        return None
    eps = getattr(norm, form.eps)
    return step.rms_norm(x, weight, eps, form.shift, is_centred=form.is_centred)


def _recognize(module: nn.Module, dtype: torch.dtype) -> _NormFormula | None:
    """Return the formula of an RMS norm, verified by running it; None for any other module.

    dtype: of its inputs.
    """
    weight = module._parameters.get("weight")
    if set(module._parameters) - {"weight"} or module._modules or module._buffers:
        return None
    if weight is not None and not _is_plain(weight):
        return None
    if dtype not in DTYPES or "forward" in module.__dict__:
        return None
    eps = next((n for n in _EPSILONS if isinstance(getattr(module, n, None), float)), None)
    if eps is None:
        return None
    x = _rows(weight).to(dtype)
    try:
        result = type(module).forward(module, x)
    except Exception:  # it needs other inputs
        return None
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (x.shape, dtype):
        return None
    near = 4 * torch.finfo(dtype).eps  # it may round twice
    for is_centred, shift in product((False, True), (0.0, 1.0) if weight is not None else (0.0,)):
        wide = x.float()
        if is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + getattr(module, eps))
        want = want if weight is None else want * (weight.float() + shift)
        allowed = near * (want.abs() + want.abs().amax(-1, keepdim=True))
        if bool(((result.float() - want).abs() <= allowed).all()):
            return _NormFormula(eps, shift, is_centred, dtype)
    return None


def _is_plain(weight: Tensor) -> bool:
    """Return True for a weight that is an ordinary vector of numbers."""
    is_known = type(weight) is nn.Parameter and weight.dtype in DTYPES
    return is_known and weight.dim() == 1 and weight.is_contiguous() and not weight.is_meta


def _rows(weight: Tensor | None) -> Tensor:
    """Return random inputs on which RMS norms and other norms differ: [n, width]."""
    width = _WIDTH if weight is None else len(weight)
    seeded = torch.Generator().manual_seed(0)
    rows = [torch.randn(width, generator=seeded) * by + on for by, on in _SIZES]
    spike = torch.zeros(width)  # the largest output, which shows clamping
    spike[0 if weight is None else int(weight.float().abs().argmax())] = 100
    x = torch.stack([*rows, spike])
    return x if weight is None else x.to(weight.device)
