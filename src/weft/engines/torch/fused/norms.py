"""Root mean square norms of a model's own modules: one kernel each in a step that has one.

Transformers writes such a norm as six to nine operations, each of which a card launches by itself;
a layer has two to six of them. Modules of our copy that are found to compute just that get a class
of their own, which is theirs but for it. Elsewhere they do as they did.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..hook import step_of

_FORM = "weft_norm"
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
    n = 0
    for module in model.modules():
        form = _form_of(module, dtype)
        if form is not None:
            module.__dict__[_FORM] = form
            kind: Any = type(module)
            module.__class__ = _by_step(kind)
            n += 1
    return n


@cache
def _by_step(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a norm, which asks the step first."""

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        form: _NormForm = self.__dict__[_FORM]
        step = step_of(self)
        if step is None or not step.turns or named or len(given) != 1:
            return kind.forward(self, *given, **named)
        (x,) = given
        if x.dtype != form.dtype or not step.can_norm(x):
            return kind.forward(self, x)
        weight: Any = self._parameters["weight"]
        return step.normed(x, weight, form.eps, form.shift, is_centred=form.is_centred)

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})


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
