"""Gated feed-forward modules of a model, with activation and product as one kernel in a step.

They compute `down(activation(gate(x)) * up(x))`. `gate` and `up` may be the halves of one layer,
in either order.
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


class _GatedMlp(NamedTuple):
    """Names of the layers of a gated MLP (SwiGLU and others) and its activation.

    A module with this description is run as `down(act_and_mul(gate, up))` in a step.
    """

    # The layers that get the module's input: gate and up, or one layer with both as halves.
    inputs: tuple[str, ...]
    # The halves are up and gate.
    is_swapped: bool
    # Name of the activation module.
    act: str
    # The activation module at the time of the check.
    act_module: nn.Module
    activation: Activation
    # Name of the output layer.
    down: str
    # Input dtype of the check.
    dtype: torch.dtype

    def gate_and_up(self, modules: dict[str, Any], x: Tensor) -> Sequence[Tensor]:
        """Return the gate and up projections of x. modules: the MLP's layers by name."""
        if len(self.inputs) == 2:
            return [modules[name](x) for name in self.inputs]
        halves: Sequence[Tensor] = modules[self.inputs[0]](x).chunk(2, -1)
        return halves[::-1] if self.is_swapped else halves


@torch.inference_mode()
def fuse_gates(model: nn.Module, dtype: torch.dtype) -> int:
    """Patch gated feed-forward modules; return their number. dtype: of their inputs."""
    return patch_forward(model, lambda module: _recognize(module, dtype), _run_gated_mlp)


def _run_gated_mlp(part: nn.Module, step: AttentionStep, form: _GatedMlp, x: Tensor) -> Any:
    """Run a gated MLP, with the step's kernel if it supports the inputs, else as plain operations.

    Returns: None if the module's own code must run: the dtype or the activation module is not the
    one of the check.
    """
    modules: dict[str, Any] = part._modules
    act = modules[form.act]
    if x.dtype != form.dtype or act is not form.act_module or not is_bare(act):
        return None
    gate, up = form.gate_and_up(modules, x)
    if step.supports_act_and_mul(gate, up):
        return modules[form.down](step.act_and_mul(gate, up, form.activation))
    return modules[form.down](act(gate) * up)  # hooks may return other shapes


def _recognize(module: nn.Module, dtype: torch.dtype) -> _GatedMlp | None:
    """Return the layers of a gated MLP, verified by running it; None for any other module.

    dtype: of its inputs.
    """
    layers = [name for name, each in module._modules.items() if isinstance(each, nn.Linear)]
    others = [(name, each) for name, each in module._modules.items() if name not in layers]
    if len(layers) not in (2, 3) or len(others) != 1 or "forward" in module.__dict__:
        return None
    if module._parameters or module._buffers or dtype not in DTYPES:
        return None
    ((act, act_module),) = others
    activation = activation_of(act_module)
    if activation is None or any(weight.is_meta for weight in module.parameters()):
        return None
    first: Any = module._modules[layers[0]]
    for form in _candidates(layers, act, act_module, activation, dtype):
        if _matches(module, form, first):
            return form
    return None


def _candidates(
    layers: Sequence[str], act: str, act_module: Any, activation: Activation, dtype: torch.dtype
) -> Iterator[_GatedMlp]:
    """Yield possible roles (gate, up, down) of a module's layers, the usual one first."""
    for *inputs, down in permutations(layers):
        for is_swapped in (False, True)[: 3 - len(inputs)]:
            yield _GatedMlp(tuple(inputs), is_swapped, act, act_module, activation, down, dtype)


def _matches(module: nn.Module, form: _GatedMlp, first: Any) -> bool:
    """Run a module and a description of it on some rows; return True if the results are equal.

    first: any of its linear layers.
    """
    modules: dict[str, Any] = module._modules
    n_in, weight = modules[form.inputs[0]].in_features, first.weight
    x = rows_of_sizes(n_in, weight.device, form.dtype)[None]
    try:
        result = type(module).forward(module, x)
        gate, up = form.gate_and_up(modules, x)
        want = modules[form.down](modules[form.act](gate) * up)
    except Exception:  # other shapes, or it needs other inputs
        return False
    return is_near(result, want, form.dtype)
