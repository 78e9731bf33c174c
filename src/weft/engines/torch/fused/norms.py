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

from ..memory import KVStep
from .by_step import ask_step_first

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows that tell such a norm from others: of any size, away from 0, and small, where eps counts.
_SIZES = ((1.0, 0.0), (30.0, 0.0), (1.0, 3.0), (1e-3, 0.0))


class _NormForm(NamedTuple):
    """What a norm does: x, less its mean if is_centred, times shift + weight, over the root of mean
    square + eps.
    """

    eps: float
    shift: float
    is_centred: bool
    dtype: torch.dtype  # of x, for which that was found


@torch.inference_mode()
def fuse_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Let the norms of our copy, whose modules have seats, be the step's; return how many are.

    dtype: of what they are given.
    """
    return ask_step_first(model, lambda module: _form_of(module, dtype), _normed)


def _normed(norm: nn.Module, step: KVStep, form: _NormForm, x: Tensor) -> Tensor | None:
    if x.dtype != form.dtype or not step.can_norm(x):
        return None
    weight: Any = norm._parameters["weight"]
    return step.normed(x, weight, form.eps, form.shift, is_centred=form.is_centred)


def _form_of(module: nn.Module, dtype: torch.dtype) -> _NormForm | None:
    """Return what a module does, if that is such a norm and nothing else."""
    weight = module._parameters.get("weight")
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return None
    if type(weight) is not nn.Parameter or weight.dim() != 1 or weight.dtype not in _DTYPES:
        return None
    if dtype not in _DTYPES or "forward" in module.__dict__:
        return None
    found = (getattr(module, name, None) for name in _EPSILONS)
    eps = next((each for each in found if isinstance(each, float)), None)
    if eps is None or weight.is_meta:
        return None
    seeded = torch.Generator().manual_seed(0)
    rows = [torch.randn(len(weight), generator=seeded) * by + on for by, on in _SIZES]
    x = torch.stack(rows).to(weight.device, dtype)
    try:
        made = type(module).forward(module, x)
    except Exception:  # it wants more than rows
        return None
    if not isinstance(made, Tensor) or (made.shape, made.dtype) != (x.shape, dtype):
        return None
    near = 4 * torch.finfo(dtype).eps  # it may round twice
    for is_centred, shift in product((False, True), (0.0, 1.0)):
        wide = x.float()
        if is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        want = scaled * (weight.float() + shift)
        if torch.allclose(made.float(), want, rtol=near, atol=near * float(want.abs().max())):
            return _NormForm(eps, shift, is_centred, dtype)
    return None
