"""Rotary embeddings of a model's own attention: one kernel for a layer's heads in a paged step.

Transformers' attention modules call a function of their file, `apply_rotary_pos_emb`, which is ten
operations for queries and keys. Modules of our copy get a class of their own, whose `forward` is
theirs but for that one name; the file, and what others make of its classes, stays as it is.
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
_SIZE = 16  # of heads that a function is tried with
_TOKENS = 3

Cosines = Literal["whole", "part", "half"]


class _Form(NamedTuple):
    """How a function turns heads.

    n: how many tensors of heads it takes. cosines: there is one for every number of a head, for
    those of a part that alone is turned, or for every two. are_neighbours, every: see
    `RotaryLayout`.
    """

    n: int
    cosines: Cosines
    are_neighbours: bool = False
    every: int = 1

    def pairs(self, size: int, width: int) -> RotaryLayout | None:
        """Return which numbers of a head of some size so many cosines turn; None: none such."""
        n = 2 * width if self.cosines == "half" else width
        is_known = n == size or (self.cosines == "part" and n < size and n % 2 == 0)
        return RotaryLayout(n, self.are_neighbours, self.every) if is_known else None


class _TurnForm(NamedTuple):
    """What a function does, and for which dtypes of heads and cosines it gives the heads' own."""

    form: _Form
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]]


# What functions are tried for, those of most models first.
_FORMS = [
    _Form(n, cosines, *pairing)
    for n in (2, 1)
    for pairing in ((False, 1), (True, 1), (True, 2))
    for cosines in ("part", "whole", "half")
    if pairing != (True, 1) or cosines != "half"
]


@torch.inference_mode()
def fuse_rotary(model: nn.Module, call: ForwardContext, dtype: torch.dtype) -> int:
    """Let attention of our copy, whose modules have seats, turn heads by the step; return how many
    modules do.

    call: that of the seats. dtype: of the heads.
    """
    made: dict[Any, type[nn.Module] | None] = {}
    n = 0
    for module in model.modules():
        kind: Any = type(module)
        if kind not in made:
            made[kind] = _by_step(kind, call, dtype)
        other = made[kind]
        if other is not None and "forward" not in module.__dict__:
            module.__class__ = other
            n += 1
    return n


def _by_step(
    kind: type[nn.Module], call: ForwardContext, dtype: torch.dtype
) -> type[nn.Module] | None:
    """Return a class that turns heads by the step of a call; None where this one does not call such
    a function.
    """
    own: Any = kind.forward
    caller = _caller(own)
    plain = None if caller is None else caller.__globals__.get(_NAME)
    form = None if plain is None else _form_of(plain, dtype)
    if plain is None or form is None:
        return None
    turning = _calling(own, _Turning(call, plain, form))

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        step = current_step(self)
        does = own if step is None or not step.has_fused_ops else turning
        return does(self, *given, **named)

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})


def _caller(function: Any) -> FunctionType | None:
    """Return the function that calls the one that turns, perhaps within decorators; or None."""
    if not isinstance(function, FunctionType):
        return None
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return function if _NAME in function.__code__.co_names else None
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return _caller(inner) if any(each is inner for each in held) else None


def _calling(function: Any, turning: Callable[..., Any]) -> FunctionType:
    """Return a function whose caller, as `_caller` finds it, calls another one that turns."""
    inner, closure, names = getattr(function, "__wrapped__", None), function.__closure__, None
    if inner is None:
        names = {**function.__globals__, _NAME: turning}
    else:
        other = CellType(_calling(inner, turning))
        closure = tuple(other if cell.cell_contents is inner else cell for cell in closure)
    made = FunctionType(
        function.__code__,
        function.__globals__ if names is None else names,
        function.__name__,
        function.__defaults__,
        closure,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Turning:
    """Stands for a function that turns heads, in steps that do."""

    def __init__(self, call: ForwardContext, plain: Callable[..., Any], form: _TurnForm) -> None:
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
                turned = step.apply_rotary(heads, cos, sin, axis, pairs)
                return turned if form.n > 1 else turned[0]
        return self._plain(*given, **named)


def _form_of(plain: Callable[..., Any], dtype: torch.dtype) -> _TurnForm | None:
    """Return how a function turns heads, by what it makes of some; None for other ways."""
    dtypes = [(dtype, of_cos) for of_cos in {dtype, torch.float32}]
    for form in _FORMS:
        known = frozenset(pair for pair in dtypes if _turns_so(plain, form, *pair))
        if known:
            return _TurnForm(form, known)
    return None


def _turns_so(
    plain: Callable[..., Any], form: _Form, dtype: torch.dtype, of_cos: torch.dtype
) -> bool:
    """Whether a function does that to tensors of heads, laid either way."""
    seeded = torch.Generator().manual_seed(0)
    widths = {"whole": [_SIZE], "half": [_SIZE // 2], "part": [_SIZE, _SIZE // 2]}[form.cosines]
    for width, axis in product(widths, (1, 2)):
        shapes = [(1, 2 + i, _TOKENS, _SIZE) for i in range(form.n)]
        heads = [torch.randn(shape, generator=seeded).to(dtype) for shape in shapes]
        heads = [each.transpose(1, axis) for each in heads]
        cos, sin = (torch.randn(1, _TOKENS, width, generator=seeded).to(of_cos) for _ in "cs")
        if form.cosines != "half":  # what turns together turns by one angle, which some rely on
            cos, sin = (_in_pairs(each[..., : width // 2], form) for each in (cos, sin))
        try:
            made = plain(*heads, cos, sin, unsqueeze_dim=axis)
        except Exception:
            return False
        made = made if isinstance(made, Sequence) else [made]
        if len(made) != form.n or any(not isinstance(each, Tensor) for each in made):
            return False
        pairs = form.pairs(_SIZE, width)
        assert pairs is not None
        for each, of in zip(made, heads, strict=True):
            if (each.shape, each.dtype) != (of.shape, of.dtype):
                return False
            want = turned_plainly(of, cos, sin, axis, pairs)
            near = 8 * torch.finfo(dtype).eps  # each product and the sum may round
            if not torch.allclose(each.float(), want, rtol=near, atol=near * 4):
                return False
    return True


def _in_pairs(rotary_angles: Tensor, form: _Form) -> Tensor:
    """Return what is of every pair as it is given for every number."""
    if form.are_neighbours and form.every == 1:
        return rotary_angles.repeat_interleave(2, -1)
    return rotary_angles.repeat(1, 1, 2)


def turned_plainly(x: Tensor, cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout) -> Tensor:
    """Turn heads in float32: what a step's `turned` gives of one tensor."""
    at = torch.arange(pairs.n, device=x.device) // pairs.every % cos.shape[-1]
    cos, sin = (each.float()[..., at].unsqueeze(axis) for each in (cos, sin))
    turning, rest = x.float().split([pairs.n, x.shape[-1] - pairs.n], -1)
    if pairs.are_neighbours:
        pair = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        first, second = turning.chunk(2, -1)
        pair = torch.cat((-second, first), -1)
    return torch.cat((turning * cos + pair * sin, rest), -1)
