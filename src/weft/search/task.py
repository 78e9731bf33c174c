"""Tasks: kinds of problems that a search knows more about, and the Game of 24 as an example."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

Lines = tuple[str, ...]


class Task:
    """Knowledge about one kind of problem. Subclass it and override the methods that apply.

    A search uses a task to ask the model for steps, to value partial answers, to skip repeated
    states and to check answers. A task solves nothing itself.

    `lines` in the methods are the steps after the prompt, without line ends.

    Attributes:
        steps: number of lines before the answer; None if unknown.
        verdicts: the model's words for a good and a bad state, as answers to `question`.
        n_continue, n_suggest: lines to propose per node: by continuing the answer, and by asking
            for a step with the `suggestion` prompt. One number, or one per level.
    """

    steps: int | None = None
    verdicts: tuple[str, str] = ("yes", "no")
    n_continue: int | Sequence[int] = 8
    n_suggest: int | Sequence[int] = 8

    def state(self, lines: Lines) -> Hashable | None:
        """Return a key of the situation after these lines; paths with equal keys are duplicates.

        A search follows only one of several duplicates. None means that the last line is invalid,
        so the search does not follow it. By default no two paths are duplicates.
        """
        return lines

    def suggestion(self, lines: Lines) -> str | None:
        """Return a prompt that asks the model for one next step after `lines`, or None."""
        return None

    def question(self, lines: Lines) -> str | None:
        """Return a prompt that asks the model whether these lines can still lead to an answer.

        The model answers with one of `verdicts`, and the probability of the first one is the score.
        None scores 0. By default a search scores candidates by their likelihood instead.
        """
        return None

    def is_solved(self, text: str) -> bool:
        """Return True if `text`, all text after the prompt, is a correct answer.

        If a task does not override this, searches do not check answers.
        """
        return False


def overrides(task: Task | None, name: str) -> bool:
    """Return True if the task's class overrides the method `name` of `Task`."""
    return task is not None and getattr(type(task), name) is not getattr(Task, name)


_PROMPT = re.compile(r"\s*Use (\d{1,4}(?: \d{1,4}){1,7}) to make (\d{1,6})\.\s*")
_STEP = re.compile(r"\d+ [-+*/] \d+ = \d+ \(left: (\d+(?: \d+)*)\)")
_ANSWER = re.compile(r"Answer: ([-+*/() \d]{1,200}) = (\d{1,6})")
_TOKEN = re.compile(r"\d+|[-+*/()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True, slots=True)
class Game24(Task):
    """The Game of 24: make `target` from all the numbers, each used once, with + - * /.

    The model proposes and values the steps; this class writes prompts and reads lines.
    """

    numbers: tuple[int, ...]
    target: int = 24

    @classmethod
    def read(cls, prompt: str) -> Game24 | None:
        """Parse a prompt such as "Use 4 6 8 1 to make 24."; return None for any other text."""
        match = _PROMPT.fullmatch(prompt)
        return cls(tuple(map(int, match[1].split())), int(match[2])) if match else None

    @property
    def prompt(self) -> str:
        """The prompt that asks for the puzzle's solution."""
        return f"Use {_joined(self.numbers)} to make {self.target}."

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Number of lines before the answer: each line combines two numbers into one."""
        return len(self.numbers) - 1

    @property
    def verdicts(self) -> tuple[str, str]:  # type: ignore[override]
        """The model's answers to `question`, first the good one."""
        return ("sure", "impossible")

    @property
    def n_continue(self) -> tuple[int, ...]:  # type: ignore[override]
        """Numbers of lines that continue the answer, one per level.

        Most are at the first level, where good steps are rare.
        """
        return (16, 8, 2)

    @property
    def n_suggest(self) -> tuple[int, ...]:  # type: ignore[override]
        """Numbers of lines from the `suggestion` prompt, one per level."""
        return (24, 16, 4)

    def left(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the sorted numbers that remain after the last line; None if it is invalid."""
        if not lines:
            return tuple(sorted(self.numbers))
        match = _STEP.fullmatch(lines[-1].strip())
        if match is None or len(lines) > self.steps:
            return None
        left = tuple(sorted(map(int, match[1].split())))
        return left if len(left) == len(self.numbers) - len(lines) else None

    def state(self, lines: Lines) -> tuple[int, ...] | None:
        """Return the sorted remaining numbers; paths that reach the same numbers are duplicates."""
        return self.left(lines)

    def suggestion(self, lines: Lines) -> str | None:
        """Return the prompt "Suggest a step from 4 6 8." with the remaining numbers.

        None if the last line is invalid or one number remains.
        """
        left = self.left(lines)
        if left is None or len(left) < 2:
            return None
        return f"Suggest a step from {_joined(left)}."

    def question(self, lines: Lines) -> str | None:
        """Return the prompt "Can 4 6 8 make 24?" with the remaining numbers.

        The search scores the step by the model's probability of "sure" against "impossible". None
        if the last line is invalid.
        """
        left = self.left(lines)
        return None if left is None else f"Can {_joined(left)} make {self.target}?"

    def is_solved(self, text: str) -> bool:
        """Return True if the last line is a correct "Answer: … = 24" that uses each number once."""
        match = _ANSWER.fullmatch(text.strip().rsplit("\n", 1)[-1].strip())
        if match is None or int(match[2]) != self.target:
            return False
        used = Counter(map(int, re.findall(r"\d+", match[1])))
        return used == Counter(self.numbers) and evaluate(match[1]) == self.target


def evaluate(expression: str) -> Fraction | None:
    """Compute an arithmetic expression of integers, + - * / and brackets, exactly.

    None if it is malformed or divides by 0.
    """
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
    """Apply the stacked operators that precede `token`, then push it (shunting-yard).

    A ")" is not pushed, but removes its "(".

    Both lists change in place.

    Args:
        values: operands, the last one on top.
        operators: operators and open brackets that are not applied yet.
        token: the next operator or ")"; "" at the end of the expression.

    Returns: False for a division by 0 or a ")" without "(". A "(" without ")" stays in `operators`.
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
    """Return True if `operator`, from the stack, must be applied before the next `token`."""
    return _PRECEDENCE[operator] >= _PRECEDENCE.get(token, 0)


def _calculate(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    """Return `left operator right`; None for a division by 0."""
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
