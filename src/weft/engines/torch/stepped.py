"""How often optimizers have stepped over a model's parameters.

PyTorch counts what is written into a tensor, but not by kernels that write to many at once: those
of optimizers with fused=True, and of other packages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class OptimizerSteps:
    """n: the steps of any optimizer of these parameters, from now on."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.n = 0
        self._known = frozenset(map(id, parameters))
        mine = weakref.ref(self)

        def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (steps := mine()) is not None:
                steps.see(optimizer)

        hook = register_optimizer_step_post_hook(count)
        self.stop = weakref.finalize(self, hook.remove)

    def see(self, optimizer: Optimizer) -> None:
        """Count a step of it, if it is of a parameter here."""
        groups = optimizer.param_groups
        self.n += any(id(each) in self._known for group in groups for each in group["params"])
