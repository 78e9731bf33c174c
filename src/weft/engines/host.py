"""The result of a forward whose logits are already on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Output, Score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..sampling.chain import DrawBatch, DrawResult


class HostDraws:
    """Draws that are there at once."""

    __slots__ = ("_result",)

    def __init__(self, result: DrawResult) -> None:
        self._result = result

    def result(self) -> DrawResult:
        """Return the draws; never waits."""
        return self._result


class HostOutput(Output):
    """Logits and scores in host memory.

    logits: float32 [N, V], rows in the order that `Output` numbers them; owned by this object.
    scores: one list a row, one Score a ScoreSpan.
    """

    __slots__ = ("_logits", "_scores")

    def __init__(self, logits: NDArray[np.float32], scores: list[list[Score]]) -> None:
        self._logits = logits
        self._scores = scores

    def wait(self) -> None:
        """Return at once: the step was done before this object was made."""

    def logits(self, index: int) -> NDArray[np.float32]:
        """Return a copy of logits row `index`: float32 [V]."""
        return self._logits[index].copy()

    def scores(self) -> list[list[Score]]:
        """Return one list a row, one Score a ScoreSpan."""
        return self._scores

    def draw(self, batch: DrawBatch) -> HostDraws:
        """Draw with the NumPy reference sampler; done on return."""
        return HostDraws(
            batch.chain.draw(self._logits, batch.rows, batch.positions, kept=batch.kept)
        )
