"""One planned step: which rows go into which model call, and what is done with the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..engines.base import Engine, Output, Row
from ..errors import ForwardError, WeftError
from .rows import LogitsRow, RowStore

if TYPE_CHECKING:
    from .desk import Desk
    from .jobs import Job


class Part(ABC):
    """Some rows of a model call, and what to do with the answer.

    namespace: the adapter that its rows name. output, first_row, first_logit: where its answers
    are, once it is launched. kept: its logits rows that others may ask for, once it has landed.
    error: what went wrong with this part alone. hangs: the rows kept are hung on the tree.
    """

    hangs = False

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.launched = False
        self.error: Exception | None = None
        self.output: Output | None = None
        self.first_row = 0
        self.first_logit = 0
        self.kept: list[LogitsRow] = []

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the rows that the engine is to run."""

    @abstractmethod
    def n_logits(self) -> int:
        """Return how many logits rows they ask for."""

    @abstractmethod
    def jobs(self) -> Iterable[Job]:
        """Return the jobs that fail when the step does."""

    def n_kept(self) -> int:
        """Return how many of its logits rows, the first ones, others may ask for."""
        return 0

    def draw(self) -> None:
        """Start drawing from the output, once all steps before have landed; does not wait."""

    def land(self) -> None:
        """Wait for what was drawn. Raises what made it fail."""

    def attempt(self, action: Callable[[], None]) -> None:
        """Do something that may fail for this part alone."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    @abstractmethod
    def deliver(self, desk: Desk) -> None:
        """Give out what the step brought. Under the lock, once the step has landed."""

    @abstractmethod
    def discard(self, desk: Desk) -> None:
        """Undo what the part has written or promised: its step failed, and nothing runs."""


class LinesPart(Part):
    """A part whose rows are the next tokens of lines."""

    @abstractmethod
    def n_tokens(self) -> int:
        """Return how many tokens its rows run."""


class Call:
    """One model call of a step: all parts of one adapter."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.output: Output | None = None
        self.n_logits = 0

    def launch(self, engine: Engine) -> None:
        """Call the model."""
        rows: list[Row] = []
        for part in self.parts:
            part.first_row, part.first_logit = len(rows), self.n_logits
            own = part.rows()
            rows += own
            self.n_logits += part.n_logits()
        self.output = engine.forward(rows)
        for part in self.parts:
            part.output, part.launched = self.output, True

    def draw(self) -> None:
        """Start what draws from the model's answer."""
        for part in self.parts:
            part.attempt(part.draw)

    def land(self) -> None:
        """Wait for the model, and for the draws. Raises what made the model fail."""
        assert self.output is not None
        self.output.wait()
        for part in self.parts:
            part.attempt(part.land)

    def keep(self, store: RowStore) -> None:
        """Keep the logits rows that somebody may ask for."""
        assert self.output is not None
        n_kept = sum(part.n_kept() for part in self.parts)
        for part in self.parts:
            if part.n_kept():
                span = range(part.first_logit, part.first_logit + part.n_kept())
                part.kept = store.keep(self.output, span, n_kept, self.n_logits, hung=part.hangs)
        if n_kept:
            store.shrink()


class Step:
    """A step on its way. `error` is what made it fail."""

    def __init__(self, parts: Sequence[Part]) -> None:
        by_name: dict[str | None, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.namespace, []).append(part)
        self.calls = [Call(some) for some in by_name.values()]
        self.parts = parts
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Wait for what a failed step, or one launched from it, has on the device."""
        for call in self.calls:
            if call.output is not None:
                with suppress(Exception):
                    call.output.wait()


def as_forward_error(error: BaseException) -> WeftError:
    """Return what the tickets of a failed step get."""
    if isinstance(error, WeftError):
        return error
    wrapped = ForwardError(f"the model call failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
