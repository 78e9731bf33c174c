"""Modules of the engine's copy whose forward uses kernels of the running step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import nn

from ..attention_hook import current_step

FORM = "weft_form"
Form = TypeVar("Form")
# Returns a module's output; None to run the module's own code.
Run = Callable[..., Any]


def patch_forward(
    model: nn.Module,
    recognize: Callable[[nn.Module], Form | None],
    run: Run,
    n_inputs: tuple[int, ...] = (1,),
) -> int:
    """Make modules of known kinds use a kernel in steps with fused operations.

    The class of such a module becomes a subclass. Its forward calls `run`.

    Args:
        recognize: returns a description of what a module computes; None leaves the module as it is.
        run: called with a module, the step, that description and the module's inputs. Returns None
            to run the module's own code.
        n_inputs: allowed numbers of positional inputs; keyword inputs run the module's own code.

    Returns:
        The number of replaced modules.
    """
    n = 0
    for module in model.modules():
        form = None if FORM in module.__dict__ else recognize(module)  # copies are patched already
        if form is not None:
            module.__dict__[FORM] = form
            kind: Any = type(module)
            module.__class__ = _patched_class(kind, run, n_inputs)
            n += 1
    return n


@cache
def _patched_class(kind: type[nn.Module], run: Run, n_inputs: tuple[int, ...]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward calls `run` during steps with fused operations."""

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        step, result = current_step(self), None
        if step is not None and step.has_fused_ops and len(inputs) in n_inputs and not options:
            result = run(self, step, self.__dict__[FORM], *inputs)
        return kind.forward(self, *inputs, **options) if result is None else result

    return type(f"{kind.__name__}ByStep", (kind,), {"forward": forward, "__module__": __name__})
