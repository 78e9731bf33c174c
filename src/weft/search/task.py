"""What a search may know of a kind of problem, and the Game of 24 as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

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


_PROMPT = re.compile(r"\s*Use (\d{1,4}(?: \d{1,4}){1,7}) to make (\d{1,6})\.\s*")
_STEP = re.compile(r"\d+ [-+*/] \d+ = \d+ \(left: (\d+(?: \d+)*)\)")
_ANSWER = re.compile(r"Answer: ([-+*/() \d]{1,200}) = (\d{1,6})")
_TOKEN = re.compile(r"\d+|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True, slots=True)
class Game24(Task):
    """Make `target` from all the numbers, each once. Only the model proposes and values steps."""

    numbers: tuple[int, ...]
    target: int = 24

    @classmethod
    def read(cls, prompt: str) -> Game24 | None:
        """Return the puzzle that a prompt asks for; None when it asks for something else."""
        found = _PROMPT.fullmatch(prompt)
        return cls(tuple(map(int, found[1].split())), int(found[2])) if found else None

    @property
    def prompt(self) -> str:
        """The prompt that asks for the puzzle's solution."""
        return f"Use {_spaced(self.numbers)} to make {self.target}."

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Each step leaves one number less."""
        return len(self.numbers) - 1

    @property
    def verdicts(self) -> tuple[str, str]:  # type: ignore[override]
        """The words that answer `question`."""
        return ("sure", "impossible")

    @property
    def n_continue(self) -> tuple[int, ...]:  # type: ignore[override]
        """Many first steps, for the right one may be unlikely; few of two numbers."""
        return (16, 8, 2)

    @property
    def n_suggest(self) -> tuple[int, ...]:  # type: ignore[override]
        """More than continued ones: suggestions spread evenly over all steps there are."""
        return (24, 16, 4)

    def left(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the numbers that the last line says are left; None when it cannot be read."""
        if not lines:
            return tuple(sorted(self.numbers))
        found = _STEP.fullmatch(lines[-1].strip())
        if found is None or len(lines) > self.steps:
            return None
        left = tuple(sorted(map(int, found[1].split())))
        return left if len(left) == len(self.numbers) - len(lines) else None

    def state(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the numbers left: how they came about does not matter for what comes next."""
        return self.left(lines)

    def suggestion(self, lines: Lines) -> str | None:
        """Return the propose prompt of the numbers left."""
        left = self.left(lines)
        if left is None or len(left) < 2:
            return None
        return f"Suggest a step from {_spaced(left)}."

    def question(self, lines: Lines) -> str | None:
        """Return the value prompt of the numbers left."""
        left = self.left(lines)
        return None if left is None else f"Can {_spaced(left)} make {self.target}?"

    def is_solved(self, text: str) -> bool:
        """Say whether the last line is `Answer: … = target`, of exactly the numbers, and true."""
        found = _ANSWER.fullmatch(text.strip().rsplit("\n", 1)[-1].strip())
        if found is None or int(found[2]) != self.target:
            return False
        used = Counter(map(int, re.findall(r"\d+", found[1])))
        return used == Counter(self.numbers) and evaluate(found[1]) == self.target


def evaluate(expression: str) -> Fraction | None:
    """Return the exact value of whole numbers, + - * / and brackets; None for anything else."""
    values: list[Fraction] = []
    waiting: list[str] = []
    expects_number = True
    if _TOKEN.sub("", expression).strip():
        return None
    for token in _TOKEN.findall(expression):
        if expects_number != (token.isdigit() or token == "("):
            return None
        if token.isdigit():
            values.append(Fraction(token))
        elif token == "(":
            waiting.append(token)
        elif not _settle(values, waiting, token):
            return None
        expects_number = token in "(+-*/"
    if expects_number or not _settle(values, waiting, ""):
        return None
    return values[0] if not waiting else None


def _settle(values: list[Fraction], waiting: list[str], token: str) -> bool:
    """Apply what binds tighter than the operator, bracket or end that came; False if it cannot."""
    while waiting and waiting[-1] != "(" and _binds(waiting[-1], token):
        right, left = values.pop(), values.pop()
        result = _apply(left, waiting.pop(), right)
        if result is None:
            return False
        values.append(result)
    if token == ")":
        return bool(waiting) and waiting.pop() == "("
    if token:
        waiting.append(token)
    return True


def _binds(operator: str, token: str) -> bool:
    return _PRECEDENCE[operator] >= _PRECEDENCE.get(token, 0)


def _apply(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right if right else None


def _spaced(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
