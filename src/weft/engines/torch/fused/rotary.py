"""Rotary embeddings of a model's own attention as one kernel for a layer's heads.

Attention modules of Transformers call a function of their file, `apply_rotary_pos_emb`, which is
ten operations. Modules of the engine's copy get a class whose `forward` calls a replacement. The
file and other users of its classes are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from types import CellType, FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..attention_hook import ForwardContext, current_step
from ..kv_backend import RotaryLayout

_NAME = "apply_rotary_pos_emb"
_SIZE = 16  # head size of the check
_TOKENS = 3

Cosines = Literal["full", "part", "half"]


class _RotaryFormula(NamedTuple):
    """Formula of an `apply_rotary_pos_emb`: number of tensors, shape of cosines, pairing."""

    n: int  # tensors of heads
    # One cosine for each dimension of a head, of its rotated leading part, or for each pair.
    cosines: Cosines
    are_neighbours: bool = False
    every: int = 1

    def pairs(self, size: int, width: int) -> RotaryLayout | None:
        """Return which dimensions of a head are rotated together; None if the formula does not fit.

        size: dimensions of a head. width: cosines per token.
        """
        n = 2 * width if self.cosines == "half" else width
        is_known = n == size or (self.cosines == "part" and n < size and n % 2 == 0)
        return RotaryLayout(n, self.are_neighbours, self.every) if is_known else None


class _RotaryFunction(NamedTuple):
    """A rotary function's formula, and the dtypes for which it keeps the heads' dtype.

    dtypes: pairs of the dtypes of heads and of cosines.
    """

    form: _RotaryFormula
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]]


# Candidates, the most common first.
_FORMULAS = [
    _RotaryFormula(n, cosines, *pairing)
    for n in (2, 1)
    for pairing in ((False, 1), (True, 1), (True, 2))
    for cosines in ("part", "full", "half")
    if pairing != (True, 1) or cosines != "half"
]


@torch.inference_mode()
def fuse_rotary(model: nn.Module, call: ForwardContext, dtype: torch.dtype) -> int:
    """Patch attention modules to apply rotary embedding in the step; return their number.

    Args:
        call: the model's `ForwardContext`.
        dtype: of the heads.
    """
    result: dict[Any, type[nn.Module] | None] = {}
    n = 0
    for module in model.modules():
        kind: Any = type(module)
        if kind not in result:
            result[kind] = _patched_class(kind, call, dtype)
        other = result[kind]
        if other is not None and "forward" not in module.__dict__:
            module.__class__ = other
            n += 1
    return n


def _patched_class(
    kind: type[nn.Module], call: ForwardContext, dtype: torch.dtype
) -> type[nn.Module] | None:
    """Return a subclass of an attention class that uses the step's rotary kernel.

    None if `kind.forward` does not call a rotary function with a known formula.
    """
    own: Any = kind.forward
    caller = _undecorated_caller(own)
    plain = None if caller is None else caller.__globals__.get(_NAME)
    form = None if plain is None else _recognize(plain, dtype)
    if plain is None or form is None:
        return None
    replacement = _with_replacement(own, _StepRotary(call, plain, form))

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        step = current_step(self)
        does = own if step is None or not step.has_fused_ops else replacement
        return does(self, *given, **named)

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})


def _undecorated_caller(function: Any) -> FunctionType | None:
    """Return the function below all decorators, if its code calls `apply_rotary_pos_emb`.

    None if the code does not name it, or a decorator is not a closure over the function.
    """
    if not isinstance(function, FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return function if _NAME in function.__code__.co_names else None
    contents = [cell.cell_contents for cell in function.__closure__ or ()]
    return _undecorated_caller(inner) if any(value is inner for value in contents) else None


def _with_replacement(function: Any, replacement: Callable[..., Any]) -> FunctionType:
    """Return a copy of a function that calls `replacement` instead of `apply_rotary_pos_emb`.

    Decorators are copied too: the copy has the same ones around its `_undecorated_caller`.
    """
    inner, closure, names = getattr(function, "__wrapped__", None), function.__closure__, None
    if inner is None:
        names = {**function.__globals__, _NAME: replacement}
    else:
        other = CellType(_with_replacement(inner, replacement))
        closure = tuple(other if cell.cell_contents is inner else cell for cell in closure)
    result = FunctionType(
        function.__code__,
        function.__globals__ if names is None else names,
        function.__name__,
        function.__defaults__,
        closure,
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return result


class _StepRotary:
    """Replaces a rotary function: uses the running step's kernel if it supports the inputs.

    Args:
        call: the model's `ForwardContext`.
        plain: the original function, for all other inputs.
        form: formula of that function.
    """

    def __init__(
        self, call: ForwardContext, plain: Callable[..., Any], form: _RotaryFunction
    ) -> None:
        self._call, self._plain, self._form = call, plain, form

    def __call__(self, *given: Any, **named: Any) -> Any:
        (form, dtypes), axis, step = self._form, named.get("unsqueeze_dim", 1), self._call.step
        if len(given) == form.n + 2 and step is not None and not set(named) - {"unsqueeze_dim"}:
            heads, (cos, sin) = given[: form.n], given[form.n :]
            pairs = form.pairs(heads[0].shape[-1], cos.shape[-1])
            is_known = all((each.dtype, cos.dtype) in dtypes for each in heads)
            if (
                pairs
                and is_known
                and axis in (1, 2)
                and step.supports_rotary(heads, cos, sin, axis)
            ):
                rotated = step.apply_rotary(heads, cos, sin, axis, pairs)
                return rotated if form.n > 1 else rotated[0]
        return self._plain(*given, **named)


def _recognize(plain: Callable[..., Any], dtype: torch.dtype) -> _RotaryFunction | None:
    """Return the formula of a rotary function, verified by running it; None if none matches.

    dtype: of the heads.
    """
    dtypes = [(dtype, of_cos) for of_cos in {dtype, torch.float32}]
    for form in _FORMULAS:
        known = frozenset(pair for pair in dtypes if _matches(plain, form, *pair))
        if known:
            return _RotaryFunction(form, known)
    return None


def _matches(
    plain: Callable[..., Any], form: _RotaryFormula, dtype: torch.dtype, of_cos: torch.dtype
) -> bool:
    """Return True if a rotary function computes this formula, for heads in either memory layout.

    dtype: of the heads. of_cos: of cosines and sines.
    """
    seeded = torch.Generator().manual_seed(0)
    widths = {"full": [_SIZE], "half": [_SIZE // 2], "part": [_SIZE, _SIZE // 2]}[form.cosines]
    for width, axis in product(widths, (1, 2)):
        shapes = [(1, 2 + i, _TOKENS, _SIZE) for i in range(form.n)]
        heads = [torch.randn(shape, generator=seeded).to(dtype) for shape in shapes]
        heads = [each.transpose(1, axis) for each in heads]
        cos, sin = (torch.randn(1, _TOKENS, width, generator=seeded).to(of_cos) for _ in "cs")
        if form.cosines != "half":  # a pair has one angle, and some functions rely on it
            cos, sin = (_repeat_per_dimension(each[..., : width // 2], form) for each in (cos, sin))
        try:
            result = plain(*heads, cos, sin, unsqueeze_dim=axis)
        except Exception:
            return False
        result = result if isinstance(result, Sequence) else [result]
        if len(result) != form.n or any(not isinstance(each, Tensor) for each in result):
            return False
        pairs = form.pairs(_SIZE, width)
        assert pairs is not None
        for got, of in zip(result, heads, strict=True):
            if (got.shape, got.dtype) != (of.shape, of.dtype):
                return False
            want = reference_rotary(of, cos, sin, axis, pairs)
            near = 8 * torch.finfo(dtype).eps  # products and the sum may round
            if not torch.allclose(got.float(), want, rtol=near, atol=near * 4):
                return False
    return True


def _repeat_per_dimension(rotary_angles: Tensor, form: _RotaryFormula) -> Tensor:
    """Return rotary angles repeated for every dimension of a pair, as the formula requires."""
    if form.are_neighbours and form.every == 1:
        return rotary_angles.repeat_interleave(2, -1)
    return rotary_angles.repeat(1, 1, 2)


def reference_rotary(x: Tensor, cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout) -> Tensor:
    """Apply rotary embedding in float32: the expected result of a step's `apply_rotary`."""
    at = torch.arange(pairs.n, device=x.device) // pairs.every % cos.shape[-1]
    cos, sin = (each.float()[..., at].unsqueeze(axis) for each in (cos, sin))
    rotated, rest = x.float().split([pairs.n, x.shape[-1] - pairs.n], -1)
    if pairs.are_neighbours:
        pair = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        pair = torch.cat((-second, first), -1)
    return torch.cat((rotated * cos + pair * sin, rest), -1)
