"""Gated products of a model's own modules: activation and product as one kernel in a step.

feed-forward    down(activation(gate(x)) * up(x))
or              both(x) in halves: gate and up, or the other way round
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kv_backend import Activation, AttentionStep
from .activations import activation_of, is_bare
from .patching import patch_forward
from .probing import DTYPES, is_near, rows_of_sizes


class _GateForm(NamedTuple):
    """Which of a module's own do what, by name.

    given: the layers that are given what the module is: gate and up, or one for both, whose halves
    are gate and up, or, `is_turned`, up and gate. dtype: for which that was found.
    """

    given: tuple[str, ...]
    is_turned: bool
    act: str
    of_gate: nn.Module  # which has that name
    activation: Activation
    down: str
    dtype: torch.dtype

    def gate_and_up(self, modules: dict[str, Any], x: Tensor) -> Sequence[Tensor]:
        if len(self.given) == 2:
            return [modules[name](x) for name in self.given]
        halves: Sequence[Tensor] = modules[self.given[0]](x).chunk(2, -1)
        return halves[::-1] if self.is_turned else halves


@torch.inference_mode()
def fuse_gates(model: nn.Module, dtype: torch.dtype) -> int:
    """Let gated products of our copy, whose modules have seats, be the step's; return how many are.

    dtype: of what they are given.
    """
    return patch_forward(model, lambda module: _form_of(module, dtype), _gated)


def _gated(part: nn.Module, step: AttentionStep, form: _GateForm, x: Tensor) -> Any:
    modules: dict[str, Any] = part._modules
    act = modules[form.act]
    if x.dtype != form.dtype or act is not form.of_gate or not is_bare(act):
        return None
    gate, up = form.gate_and_up(modules, x)
    if step.supports_act_and_mul(gate, up):
        return modules[form.down](step.act_and_mul(gate, up, form.activation))
    return modules[form.down](act(gate) * up)  # hooks may give anything


def _form_of(module: nn.Module, dtype: torch.dtype) -> _GateForm | None:
    """Return what a module does, if that is a gated product and nothing else."""
    layers = [name for name, each in module._modules.items() if isinstance(each, nn.Linear)]
    others = [(name, each) for name, each in module._modules.items() if name not in layers]
    if len(layers) not in (2, 3) or len(others) != 1 or "forward" in module.__dict__:
        return None
    if module._parameters or module._buffers or dtype not in DTYPES:
        return None
    ((act, of_gate),) = others
    activation = activation_of(of_gate)
    if activation is None or any(weight.is_meta for weight in module.parameters()):
        return None
    first: Any = module._modules[layers[0]]
    for form in _forms(layers, act, of_gate, activation, dtype):
        if _does(module, form, first):
            return form
    return None


def _forms(
    layers: Sequence[str], act: str, of_gate: Any, activation: Activation, dtype: torch.dtype
) -> Iterator[_GateForm]:
    """Yield what a module of such layers may do, the usual first."""
    for *given, down in permutations(layers):
        for is_turned in (False, True)[: 3 - len(given)]:
            yield _GateForm(tuple(given), is_turned, act, of_gate, activation, down, dtype)


def _does(module: nn.Module, form: _GateForm, first: Any) -> bool:
    """Whether a module does that, to some rows."""
    modules: dict[str, Any] = module._modules
    n_in, weight = modules[form.given[0]].in_features, first.weight
    x = rows_of_sizes(n_in, weight.device, form.dtype)[None]
    try:
        made = type(module).forward(module, x)
        gate, up = form.gate_and_up(modules, x)
        want = modules[form.down](modules[form.act](gate) * up)
    except Exception:  # other shapes, or it takes more than rows
        return False
    return is_near(made, want, form.dtype)
