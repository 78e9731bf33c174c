"""Detect common changes to a model whose weights an engine shares with its user.

The engine runs a copy of the modules. After other changes than these, users call
`lm.clear_cache()` or load the model again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ...errors import ForwardError
from .model_copy import saved_buffers

_RELOAD = "close this LM and load the model again"


class ModelGuard:
    """Detects changes to the weights and, after `watch`, to the PEFT adapters of a user's model."""

    def __init__(self, model: nn.Module) -> None:
        """model: the engine's copy, before its first forward."""
        parameters, buffers = list(model.parameters()), list(saved_buffers(model))
        self._stored: list[Tensor] = [*parameters, *buffers]
        self._counted: list[Tensor] = [p for p in parameters if not p.is_inference()]
        self._buffers = [(b, b._version) for b in buffers if not b.is_inference()]
        self._optimizer_steps = OptimizerSteps(parameters)
        # `model.to(…)` replaces this tensor's data; the alias keeps the old address in use.
        self._sentinel = next((p for p in parameters if p.is_floating_point()), None)
        self._alias = None if self._sentinel is None else self._sentinel.detach()
        self._kind = self._current_kind()
        self._peft: PeftState | None = None

    def watch(self, model: nn.Module) -> None:
        """Also watch the model object that the user keeps; call it after the load check."""
        self._peft = PeftState(model)
        # A buffer that the load check has changed is state of the model, not a weight.
        self._counted += [b for b, version in self._buffers if b._version == version]

    def version(self) -> tuple[int, int, str]:
        """Return a value that differs after a change of the weights or of PEFT adapters.

        It counts optimizer steps and the in-place writes that PyTorch counts. PyTorch does not
        count writes through `.data`. Cost: 0.05 µs a parameter.
        """
        n_writes = sum([tensor._version for tensor in self._counted])
        address = 0 if self._sentinel is None else self._sentinel.data_ptr()
        switched = "" if self._peft is None else self._peft.switched_layer()
        return n_writes + self._optimizer_steps.n, address, switched

    def addresses(self) -> int:
        """Return a number that changes when a parameter or saved buffer moves in memory.

        Captured CUDA graphs read weights at fixed addresses. Cost: 0.1 µs a tensor.
        """
        return sum([tensor.data_ptr() for tensor in self._stored])

    def check(self) -> None:
        """Raise ForwardError if the model was converted, moved or its adapters were switched."""
        known, current = self._kind, self._current_kind()
        if known is not None and current is not None and current != known:
            # Converting back does not restore the digits that were lost; moving back does.
            hint = _RELOAD + (", or move the model back" if current[0] == known[0] else "")
            raise ForwardError(
                f"the model was {known[0]} on {known[1]} when it was loaded and is {current[0]} on"
                f" {current[1]} now; {hint}",
                hint=hint,
            )
        if self._peft is not None and (layer := self._peft.switched_layer()):
            hint = f"switch them back, or {_RELOAD}"
            raise ForwardError(
                f"the PEFT adapters of {layer} were switched, merged or unmerged after the model"
                f" was loaded; {hint}",
                hint=hint,
            )

    def close(self) -> None:
        """Release the tensors and remove the optimizer hook."""
        self._stored, self._counted, self._buffers = [], [], []
        self._sentinel = self._alias = self._peft = None
        self._optimizer_steps.stop()

    def _current_kind(self) -> tuple[Any, Any] | None:
        """Return the model's dtype and device; None without parameters."""
        return None if self._sentinel is None else (self._sentinel.dtype, self._sentinel.device)


class OptimizerSteps:
    """Counts the steps (`n`) of optimizers over some parameters.

    PyTorch's version counters miss optimizers with `fused=True`, which write many tensors at once.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.n = 0
        self._ids = frozenset(map(id, parameters))
        reference = weakref.ref(self)

        def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (steps := reference()) is not None:
                groups = optimizer.param_groups
                steps.n += any(id(p) in steps._ids for group in groups for p in group["params"])

        hook = register_optimizer_step_post_hook(on_step)
        self.stop = weakref.finalize(self, hook.remove)


class PeftState:
    """Active and merged adapters of a model's PEFT layers.

    These are plain attributes, of which the engine's copy has its own; adapter weights are shared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(path, vars(m), _peft_state(vars(m))) for path, m in _peft_layers(model)]

    def switched_layer(self) -> str:
        """Return the path of a layer whose state has changed, or "". Cost: 0.5 µs a layer."""
        for path, attributes, state in self._layers:
            if _peft_state(attributes) != state:
                return path
        return ""


def layer_to_unmerge(model: nn.Module) -> str:
    """Return the path of a PEFT layer whose next forward writes to its weights, or ""."""
    for path, module in _peft_layers(model):
        is_disabled, _, merged = _peft_state(vars(module))
        if is_disabled and merged:
            return path
    return ""


def _peft_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every PEFT layer."""
    for path, module in model.named_modules():  # by name: PEFT may not be installed
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__):
            yield path, module


def _peft_state(attributes: dict[str, Any]) -> tuple[bool, Any, list[str]]:
    """Return whether a layer's adapters are disabled, which are active and which are merged."""
    active = attributes.get("_active_adapter", "default")
    active = [active] if isinstance(active, str) else list(active)
    merged = list(attributes.get("merged_adapters", ()))
    return attributes.get("_disable_adapters", False), active, merged
