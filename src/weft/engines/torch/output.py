"""What a forward of the torch engine gives: logits where they were computed, fetched when read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..base import Draws, Output, Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...sampling.sampler import DrawBatch
    from .draws import Drawer


class TorchOutput(Output):
    """Logits [N, V] on the engine's device and in its dtype; scores on the host."""

    __slots__ = ("_device_logits", "_drawer", "_host_logits", "_scores")

    def __init__(self, logits: Tensor, scores: list[list[Score]], drawer: Drawer) -> None:
        self._device_logits = logits
        self._host_logits: NDArray[np.float32] | None = None
        self._scores = scores
        self._drawer = drawer

    def wait(self) -> None:
        self._host()

    def logits(self, index: int) -> NDArray[np.float32]:
        return self._host()[index].copy()

    def scores(self) -> list[list[Score]]:
        return self._scores

    def draw(self, batch: DrawBatch) -> Draws:
        if self._drawer.can(batch):
            return self._drawer.draw(self._device_logits, batch)
        return self._drawer.on_host(self._host(), batch)

    def _host(self) -> NDArray[np.float32]:
        if self._host_logits is None:
            self._host_logits = self._device_logits.float().cpu().numpy()
        return self._host_logits
