"""What a search may know of a kind of problem."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Lines = tuple[str, ...]


class Task:
    """What a search may know of a kind of problem: derive from it and override what you know.

    `lines` are the steps after the prompt so far, without their line ends. A task words questions
    for the model and reads its lines; it solves nothing itself.

    steps: how many lines come before the answer; None: nobody knows.
    verdicts: the model's words for a good and a bad state, which answer `question`.
    n_continue, n_suggest: how many lines to propose by continuing, and by asking for them with
    `suggestion`: one number, or one a level.
    """

    steps: int | None = None
    verdicts: tuple[str, str] = ("yes", "no")
    n_continue: int | Sequence[int] = 8
    n_suggest: int | Sequence[int] = 8

    def state(self, lines: Lines) -> Hashable | None:
        """Return what counts of these lines: paths of one state need not both be followed.

        None when the last line cannot be read, or is wrong: such a candidate is not followed. If
        not overridden, all lines count.
        """
        return lines

    def suggestion(self, lines: Lines) -> str | None:
        """Return the prompt that asks for one next step; None when there is none to ask for."""
        return None

    def question(self, lines: Lines) -> str | None:
        """Return the prompt answered by one of `verdicts`; None when there is nothing to ask.

        A candidate of which nothing can be asked scores 0. If not overridden, candidates are scored
        by their likelihood.
        """
        return None

    def is_solved(self, text: str) -> bool:
        """Say whether the whole text after the prompt is a right answer.

        If not overridden, nobody knows what is right.
        """
        return False


def overrides(task: Task | None, name: str) -> bool:
    """Say whether a task brings a method of its own."""
    return task is not None and getattr(type(task), name) is not getattr(Task, name)
