"""Forward hooks on the modules that an engine runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

KEEPS_INPUT = "weft_keeps_input"  # attribute of our own hooks, which do not write to inputs


class HookWatcher:
    """All forward hooks of a model, including those that are registered later."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = hook_dicts(model.modules())

    def has_active(self, n_idle: int) -> bool:
        """Return True if there are more hooks than `n_idle`, the number of hooks without effect."""
        return any(self._hooks) and sum(map(len, self._hooks)) > n_idle


def hook_dicts(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return the dictionaries in which modules store forward hooks; empty ones have no hook."""
    return [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]


def keep_inputs(hooks: Iterable[dict[int, Any]]) -> bool:
    """Return True if no hook may write to a module's input."""
    return all(hasattr(hook, KEEPS_INPUT) for by_id in hooks for hook in by_id.values())
