"""Whether hooks on a model's modules do something: then its own code runs, each time anew."""

from __future__ import annotations

from torch import nn


class Listeners:
    """The hooks of all modules of a model, those that are put there later, too."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks = [
            hooks
            for module in model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def hear(self, n_idle: int) -> bool:
        """Whether there are some, beside `n_idle` that do nothing now."""
        return any(self._hooks) and sum(map(len, self._hooks)) > n_idle
