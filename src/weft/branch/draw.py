"""Drawing for many branches at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DeadEnd
from ..sampling.bridge import draw_rows
from ..sampling.chain import NOTHING
from .metrics import Produced
from .state import State, surprisal


def draw(branches: Sequence[State]) -> list[Produced]:
    """Draw for each branch from its logits, which must be there; all at once, and remembered.

    Raises: DeadEnd where nothing may come next.
    """
    fresh = [branch for branch in branches if branch.drawn is None]
    if fresh:
        _draw(fresh)
    return [branch.drawn for branch in branches if branch.drawn is not None]


def _draw(branches: Sequence[State]) -> None:
    raw = [branch.raw() for branch in branches]
    steered = [branch.steered(row) for branch, row in zip(branches, raw, strict=True)]
    samplers = [branch.sampler for branch in branches]
    positions = [branch.position for branch in branches]
    result = draw_rows(steered, samplers, positions, kept=True)
    assert result.kept is not None
    figures = (result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist())
    for branch, row, token, logprob, kept in zip(branches, raw, *figures, strict=True):
        if token == NOTHING:
            raise DeadEnd(f"grammar, bias and steering leave {branch!r} no token")
        own = -surprisal(row, token) if branch.steering else logprob
        branch.drawn = branch.produced(token, own, kept)
