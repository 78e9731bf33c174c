"""Tasks: kinds of problems that a search knows more about, and the Game of 24 as an example."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

Lines = tuple[str, ...]


class Task:
    """Knowledge of a kind of problem: derive from it and override the methods that apply.

    `lines` are the steps after the prompt so far, without their line ends. A task words questions
    for the model and reads its lines; it solves nothing itself.

    Attributes:
        steps: number of lines before the answer; None if unknown.
        verdicts: the model's words for a good and a bad state, the answers to `question`.
        n_continue, n_suggest: lines to propose by continuing, and by `suggestion`: one number, or
            one per level.
    """

    steps: int | None = None
    verdicts: tuple[str, str] = ("yes", "no")
    n_continue: int | Sequence[int] = 8
    n_suggest: int | Sequence[int] = 8

    def state(self, lines: Lines) -> Hashable | None:
        """Return a state of these lines; of several paths with one state, only one is followed.

        None if the last line is invalid; such a candidate is not followed. If not overridden, each
        path has its own state.
        """
        return lines

    def suggestion(self, lines: Lines) -> str | None:
        """Return the prompt for one next step; None if there is none."""
        return None

    def question(self, lines: Lines) -> str | None:
        """Return the prompt that one of `verdicts` answers; None if there is no question.

        A candidate without a question scores 0. If not overridden, candidates are scored by their
        likelihood.
        """
        return None

    def is_solved(self, text: str) -> bool:
        """Return True if the full text after the prompt is a correct answer.

        If not overridden, the search has no checker.
        """
        return False


def overrides(task: Task | None, name: str) -> bool:
    """Return True if a task overrides a method."""
    return task is not None and getattr(type(task), name) is not getattr(Task, name)


_PROMPT = re.compile(r"\s*Use (\d{1,4}(?: \d{1,4}){1,7}) to make (\d{1,6})\.\s*")
_STEP = re.compile(r"\d+ [-+*/] \d+ = \d+ \(left: (\d+(?: \d+)*)\)")
_ANSWER = re.compile(r"Answer: ([-+*/() \d]{1,200}) = (\d{1,6})")
_TOKEN = re.compile(r"\d+|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True, slots=True)
class Game24(Task):
    """The Game of 24: make `target` from all the numbers, each used once, with + - * /.

    Only the model proposes and values steps.
    """

    numbers: tuple[int, ...]
    target: int = 24

    @classmethod
    def read(cls, prompt: str) -> Game24 | None:
        """Return the puzzle of a prompt; None if the prompt is no such puzzle."""
        match = _PROMPT.fullmatch(prompt)
        return cls(tuple(map(int, match[1].split())), int(match[2])) if match else None

    @property
    def prompt(self) -> str:
        """The prompt that asks for the puzzle's solution."""
        return f"Use {_joined(self.numbers)} to make {self.target}."

    @property
    def steps(self) -> int:  # type: ignore[override]
        """The number of steps: each removes one number."""
        return len(self.numbers) - 1

    @property
    def verdicts(self) -> tuple[str, str]:  # type: ignore[override]
        """The words that answer `question`."""
        return ("sure", "impossible")

    @property
    def n_continue(self) -> tuple[int, ...]:  # type: ignore[override]
        """Many first steps, because the right one may be unlikely; few steps of two numbers."""
        return (16, 8, 2)

    @property
    def n_suggest(self) -> tuple[int, ...]:  # type: ignore[override]
        """More than continued ones: suggestions spread evenly over all possible steps."""
        return (24, 16, 4)

    def left(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the numbers that remain after the last line; None if it is invalid."""
        if not lines:
            return tuple(sorted(self.numbers))
        match = _STEP.fullmatch(lines[-1].strip())
        if match is None or len(lines) > self.steps:
            return None
        left = tuple(sorted(map(int, match[1].split())))
        return left if len(left) == len(self.numbers) - len(lines) else None

    def state(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the remaining numbers; how they were reached does not matter."""
        return self.left(lines)

    def suggestion(self, lines: Lines) -> str | None:
        """Return the prompt for a step from the remaining numbers."""
        left = self.left(lines)
        if left is None or len(left) < 2:
            return None
        return f"Suggest a step from {_joined(left)}."

    def question(self, lines: Lines) -> str | None:
        """Return the value prompt of the remaining numbers."""
        left = self.left(lines)
        return None if left is None else f"Can {_joined(left)} make {self.target}?"

    def is_solved(self, text: str) -> bool:
        """Return True if the last line is a true `Answer: … = target` with exactly the numbers."""
        match = _ANSWER.fullmatch(text.strip().rsplit("\n", 1)[-1].strip())
        if match is None or int(match[2]) != self.target:
            return False
        used = Counter(map(int, re.findall(r"\d+", match[1])))
        return used == Counter(self.numbers) and evaluate(match[1]) == self.target


def evaluate(expression: str) -> Fraction | None:
    """Return the exact value of integers with + - * / and brackets; None for anything else."""
    values: list[Fraction] = []
    operators: list[str] = []
    expects_number = True
    if _TOKEN.sub("", expression).strip():
        return None
    for token in _TOKEN.findall(expression):
        if expects_number != (token.isdigit() or token == "("):
            return None
        if token.isdigit():
            values.append(Fraction(token))
        elif token == "(":
            operators.append(token)
        elif not _apply_stacked_operators(values, operators, token):
            return None
        expects_number = token in "(+-*/"
    if expects_number or not _apply_stacked_operators(values, operators, ""):
        return None
    return values[0] if not operators else None


def _apply_stacked_operators(values: list[Fraction], operators: list[str], token: str) -> bool:
    """Apply waiting operators that come before `token`, in place.

    Args:
        values: operands, the last one on top.
        waiting: operators and brackets that are not applied yet.
        token: the next operator or bracket.

    Returns: False if that is impossible: too few operands, or a division by 0.
    """
    while operators and operators[-1] != "(" and _precedes(operators[-1], token):
        right, left = values.pop(), values.pop()
        result = _calculate(left, operators.pop(), right)
        if result is None:
            return False
        values.append(result)
    if token == ")":
        return bool(operators) and operators.pop() == "("
    if token:
        operators.append(token)
    return True


def _precedes(operator: str, token: str) -> bool:
    return _PRECEDENCE[operator] >= _PRECEDENCE.get(token, 0)


def _calculate(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right if right else None


def _joined(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
