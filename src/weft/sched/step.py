"""One planned step: which rows go into which model call, and who waits for what they give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..engines.base import Fragment, Row, ScoreSpan, Span
from ..errors import ForwardError, WeftError

if TYPE_CHECKING:
    from ..engines.base import Draws, Output
    from ..kv.cursor import Cursor
    from ..sampling.chain import DrawBatch
    from .stays import Share
    from .task import Need, RunTask


class Piece:
    """A row that is no run: absent tokens to compute, or known tokens to read again.

    Covers the path's token indices [start, start + len(tokens)). pin: the cursor at its end, pinned
    while launched. fragment: where the slots go; None for a read. takes: (need, first, last)
    answered by it.
    """

    __slots__ = ("fragment", "namespace", "path", "pin", "scored", "start", "takes", "tokens")

    def __init__(
        self,
        start: int,
        tokens: Sequence[int],
        path: tuple[Span, ...],
        pin: Cursor,
        fragment: Fragment | None,
    ) -> None:
        self.start = start
        self.tokens = tokens
        self.path = path
        self.pin = pin
        self.fragment = fragment
        self.namespace = pin.node.namespace
        self.takes: list[tuple[Need, int, int]] = []
        self.scored: list[tuple[Need, int, ScoreSpan]] = []

    @property
    def end(self) -> int:
        """Token index after the last one."""
        return self.start + len(self.tokens)

    def logits_at(self) -> tuple[int, ...]:
        """Return the row-local indices whose logits somebody takes."""
        return tuple(
            sorted({first - self.start for need, first, _ in self.takes if need.top is None})
        )

    def row(self) -> Row:
        """Return the engine's row for it."""
        spans = tuple(span for _, _, span in self.scored)
        return Row(
            self.path,
            self.tokens,
            self.start,
            self.fragment,
            self.logits_at(),
            spans,
            self.namespace,
        )


class Group:
    """The part of a step that is one model call: all rows of one adapter, runs first, stays last.

    batch: how the runs draw, from logits rows 0, 1, …; None without runs. ahead: how stays do.
    """

    __slots__ = (
        "ahead",
        "ahead_draws",
        "batch",
        "draws",
        "output",
        "pieces",
        "rows",
        "runs",
        "shares",
    )

    def __init__(self, runs: list[RunTask], rows: list[Row], batch: DrawBatch | None) -> None:
        self.runs = runs
        self.rows = rows
        self.batch = batch
        self.pieces: list[Piece] = []
        self.shares: list[Share] = []
        self.ahead: DrawBatch | None = None
        self.ahead_draws: Draws | None = None
        self.output: Output | None = None
        self.draws: Draws | None = None


class Launched:
    """A step on its way. `error` is what made its launch fail."""

    __slots__ = ("error", "groups")

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Wait for what a failed step, or one launched from it, has on the device."""
        for group in self.groups:
            if group.output is not None:
                with suppress(Exception):
                    group.output.wait()


def as_forward_error(error: BaseException) -> WeftError:
    """Return what the tickets of a failed step get."""
    if isinstance(error, WeftError):
        return error
    wrapped = ForwardError(f"the model call failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
