"""Drawing for many branches at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConstraintError, DeadEnd, ForwardError, WeftError
from ..sampling.bridge import draw_rows
from ..sampling.chain import BROKEN
from .metrics import Produced
from .state import State


def draw(branches: Sequence[State]) -> list[Produced]:
    """Draw for each branch from its logits, which must be there; all at once, and remembered.

    Raises: DeadEnd where nothing may come next; the others have drawn then.
    """
    fresh = [branch for branch in branches if branch.drawn is None]
    if fresh:
        _draw(fresh)
    return [branch.drawn for branch in branches if branch.drawn is not None]


def _draw(branches: Sequence[State]) -> None:
    rows = [branch.raw() for branch in branches]
    samplers = [branch.drawing() for branch in branches]
    positions = [branch.position for branch in branches]
    result = draw_rows(rows, samplers, positions, kept=True)
    assert result.kept is not None
    figures = (result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist())
    dead: list[tuple[State, int]] = []
    for branch, token, logprob, kept in zip(branches, *figures, strict=True):
        if token < 0:
            dead.append((branch, token))
        else:
            branch.drawn = branch.produced(token, logprob, kept)
    if dead:  # the others have drawn: asked again, they give the same
        raise _error_of(*dead[0], [branch for branch, _ in dead])


def _error_of(branch: State, token: int, dead: Sequence[State]) -> WeftError:
    if token == BROKEN:
        return ForwardError(f"the model gave logits with NaN or +inf for {branch!r}")
    matcher = branch.sampler.matcher
    if matcher is not None and matcher.failure is not None:
        return ConstraintError(f"{branch!r}: {matcher.failure}")
    named = ", ".join(map(repr, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
    return DeadEnd(
        f"grammar, bias and steering leave {named} no token",
        token_ids=branch.ids(),
        branches=dead,
    )
