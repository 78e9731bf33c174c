"""Whether hooks on a model's modules do something: then its own code runs, each time anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

LEAVES_INPUT = "weft_leaves_input"  # what a hook of ours has that writes to nothing


class Listeners:
    """The hooks of all modules of a model, those that are put there later, too."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = hooks_of(model.modules())

    def hear(self, n_idle: int) -> bool:
        """Whether there are some, beside `n_idle` that do nothing now."""
        return any(self._hooks) and sum(map(len, self._hooks)) > n_idle


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return where the hooks of modules are, those that are put there later, too."""
    return [each for m in modules for each in (m._forward_hooks, m._forward_pre_hooks)]


def leave_inputs(hooks: Iterable[dict[int, Any]]) -> bool:
    """Whether none of them may write to what a module is given."""
    return all(hasattr(hook, LEAVES_INPUT) for each in hooks for hook in each.values())
