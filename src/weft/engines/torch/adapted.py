"""The PEFT layers inside of a model that its owner handed over, and how they are switched."""

from __future__ import annotations

from typing import Any

from torch import nn


class Switches:
    """Which adapters the PEFT layers of a model add now, how strongly, and which are merged.

    Those are plain attributes, of which an engine's copy has its own. What the adapters weigh is
    in parameters, and shared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (path, vars(module), _state(vars(module)))
            for path, module in model.named_modules()
            if _is_pefts(module)
        ]

    def switched(self) -> str:
        """Return the path of a layer that is switched otherwise, "" where none is: 0.6 µs each."""
        for path, attributes, state in self._held:
            if _state(attributes) != state:
                return path
        return ""


def unmerges_as_it_runs(model: nn.Module) -> str:
    """Return the path of a PEFT layer whose next forward writes to its weights, "" if none is."""
    for path, module in model.named_modules():
        if _is_pefts(module):
            is_disabled, _, merged, _ = _state(vars(module))
            if is_disabled and merged:
                return path
    return ""


def _is_pefts(module: nn.Module) -> bool:
    """Whether PEFT made its class, or one that it is made of; PEFT itself may not be there."""
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def _state(attributes: dict[str, Any]) -> tuple[bool, list[str], list[str], list[Any]]:
    """Whether a layer is disabled, its active adapters, those that are merged, and how the active
    are scaled. attributes: the layer's own; what is not there is as PEFT's class has it.
    """
    get = attributes.get
    active = get("_active_adapter", "default")
    active = [active] if isinstance(active, str) else list(active)
    scaling = get("scaling")
    scales = [scaling.get(name) for name in active] if isinstance(scaling, dict) else []
    return get("_disable_adapters", False), active, list(get("merged_adapters", ())), scales
