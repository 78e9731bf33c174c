"""Modules of our copy that let the running step do what they do, where it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import nn

from ..hook import step_of
from ..memory import KVStep

FORM = "weft_form"
Form = TypeVar("Form")
# Returns what a module makes of the one thing that it is given; None where its own code is to.
Run = Callable[[nn.Module, KVStep, Form, Any], Any]


def ask_step_first(
    model: nn.Module, form_of: Callable[[nn.Module], Form | None], run: Run[Form]
) -> int:
    """Give modules of our copy, which have seats, a class that is theirs but for its `forward`:
    that calls `run` in a step which has kernels for it; return how many there are.

    form_of: tells what a module does, None of those that stay.
    """
    n = 0
    for module in model.modules():
        form = None if FORM in module.__dict__ else form_of(module)  # an engine's copy has it
        if form is not None:
            module.__dict__[FORM] = form
            kind: Any = type(module)
            module.__class__ = _by_step(kind, run)
            n += 1
    return n


@cache
def _by_step(kind: type[nn.Module], run: Run[Any]) -> type[nn.Module]:
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        step, made = step_of(self), None
        if step is not None and step.turns and len(given) == 1 and not named:
            made = run(self, step, self.__dict__[FORM], given[0])
        return kind.forward(self, *given, **named) if made is None else made

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})
