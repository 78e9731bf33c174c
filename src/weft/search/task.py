"""What a search may know of a kind of problem."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

Lines = tuple[str, ...]


class Task(Protocol):
    """What a search may know of a kind of problem. `lines` are the steps after the prompt so far.

    A task words questions for the model and reads its lines; it solves nothing itself.
    """

    @property
    def steps(self) -> int:
        """How many lines come before the answer."""
        ...

    @property
    def verdicts(self) -> tuple[str, str]:
        """The model's words for a good and a bad state."""
        ...

    @property
    def n_continue(self) -> int | Sequence[int]:
        """How many lines to propose by continuing: one number, or one a level."""
        ...

    @property
    def n_suggest(self) -> int | Sequence[int]:
        """How many lines to propose by asking for them: one number, or one a level."""
        ...

    def state(self, lines: Lines) -> Hashable | None:
        """Return what counts of these lines: paths of one state need not both be followed.

        None when the last line cannot be read: such a candidate scores 0 and is not followed.
        """
        ...

    def suggestion(self, lines: Lines) -> str | None:
        """Return the prompt that asks for one next step; None when there is none to ask for."""
        ...

    def question(self, lines: Lines) -> str | None:
        """Return the prompt answered by one of `verdicts`; None when there is nothing to ask."""
        ...

    def is_solved(self, text: str) -> bool:
        """Say whether the whole text after the prompt is a right answer."""
        ...
