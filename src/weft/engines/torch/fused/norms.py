"""Root mean square norms of a model's own modules: one kernel each in a step that has one.

Transformers writes such a norm as six to nine operations, each of which a card launches by itself;
a layer has two to six of them. Modules of our copy that are found to compute just that get a class
of their own, which is theirs but for it. Elsewhere they do as they did.
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
_WIDTH = 256  # of rows that a norm without weight is tried with
# Rows that tell such a norm from others: of any size, away from 0, and small, where eps counts.
_SIZES = ((1.0, 0.0), (30.0, 0.0), (1.0, 3.0), (1e-3, 0.0))


class _NormForm(NamedTuple):
    """What a norm does: x, less its mean if is_centred, times shift + weight, over the root of mean
    square + eps.

    eps: the name of what the module has it as. dtype: of x, for which that was found.
    """

    eps: str
    shift: float
    is_centred: bool
    dtype: torch.dtype


@torch.inference_mode()
def fuse_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Let the norms of our copy, whose modules have seats, be the step's; return how many are.

    dtype: of what they are given.
    """
    return patch_forward(model, lambda module: _form_of(module, dtype), _normed)


def _normed(norm: nn.Module, step: AttentionStep, form: _NormForm, x: Tensor) -> Tensor | None:
    weight: Any = norm._parameters.get("weight")
    if x.dtype != form.dtype or not step.supports_rms_norm(x, weight):
        return None
    eps = getattr(norm, form.eps)
    return step.rms_norm(x, weight, eps, form.shift, is_centred=form.is_centred)


def _form_of(module: nn.Module, dtype: torch.dtype) -> _NormForm | None:
    """Return what a module does, if that is such a norm and nothing else."""
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
        made = type(module).forward(module, x)
    except Exception:  # it wants more than rows
        return None
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (x.shape, dtype):
        return None
    near = 4 * torch.finfo(dtype).eps  # it may round twice
    for is_centred, shift in product((False, True), (0.0, 1.0) if weight is not None else (0.0,)):
        wide = x.float()
        if is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + getattr(module, eps))
        want = want if weight is None else want * (weight.float() + shift)
        allowed = near * (want.abs() + want.abs().amax(-1, keepdim=True))
        if bool(((made.float() - want).abs() <= allowed).all()):
            return _NormForm(eps, shift, is_centred, dtype)
    return None


def _is_plain(weight: Tensor) -> bool:
    is_known = type(weight) is nn.Parameter and weight.dtype in DTYPES
    return is_known and weight.dim() == 1 and weight.is_contiguous() and not weight.is_meta


def _rows(weight: Tensor | None) -> Tensor:
    """Return rows that tell such a norm from others."""
    width = _WIDTH if weight is None else len(weight)
    seeded = torch.Generator().manual_seed(0)
    rows = [torch.randn(width, generator=seeded) * by + on for by, on in _SIZES]
    spike = torch.zeros(width)  # nothing comes out larger, so what is cut off is seen
    spike[0 if weight is None else int(weight.float().abs().argmax())] = 100
    x = torch.stack([*rows, spike])
    return x if weight is None else x.to(weight.device)
