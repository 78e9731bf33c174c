"""Modules of our copy that let the running step do what they do, where it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import nn

from ..attention_hook import current_step

FORM = "weft_form"
Form = TypeVar("Form")
# Returns what a module makes of what it is given; None where its own code is to.
Run = Callable[..., Any]


def patch_forward(
    model: nn.Module,
    form_of: Callable[[nn.Module], Form | None],
    run: Run,
    n_given: tuple[int, ...] = (1,),
) -> int:
    """Give modules of our copy, which have seats, a class that is theirs but for its `forward`:
    that calls `run` in a step which has kernels for it; return how many there are.

    form_of: tells what a module does, None of those that stay. run: takes a module, the step, that
    form, and what the module is given: as many as one of n_given, none by name.
    """
    n = 0
    for module in model.modules():
        form = None if FORM in module.__dict__ else form_of(module)  # an engine's copy has it
        if form is not None:
            module.__dict__[FORM] = form
            kind: Any = type(module)
            module.__class__ = _by_step(kind, run, n_given)
            n += 1
    return n


@cache
def _by_step(kind: type[nn.Module], run: Run, n_given: tuple[int, ...]) -> type[nn.Module]:
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        step, made = current_step(self), None
        if step is not None and step.has_fused_ops and len(given) in n_given and not named:
            made = run(self, step, self.__dict__[FORM], *given)
        return kind.forward(self, *given, **named) if made is None else made

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})
