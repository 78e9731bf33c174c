"""Word problems solved one step a line, some with a slip and a second look."""

from __future__ import annotations

from random import Random

from .arithmetic import step
from .example import Example
from .problem_templates import LARGE, SMALL, Problem, Step

OPENERS = (
    "I will solve this problem step by step and be mindful of mistakes.",
    "Let me solve this step by step.",
    "Let's think step by step.",
    "I will work through this carefully.",
)
SECOND_LOOK = (
    "\n...Wait. I need to look at the problem again. Let's think about what I could've gotten "
    "wrong. I could've"
)
SLIPS = {
    "+": "added wrong",
    "*": "multiplied wrong",
    "-": "subtracted wrong",
    "/": "divided wrong",
}


def word_problem(rng: Random) -> Example:
    """Return a problem and its solution; one in eight slips first, one in twelve checks itself."""
    problem = _draw(rng)
    opener = rng.choice(OPENERS) + "\n" if rng.random() < 0.6 else ""
    good = "\n".join([*map(_line, problem.steps), f"The answer is {problem.answer}."])
    at = rng.random()
    if at < 0.12:
        bad, slip = _wrong_try(rng, problem.steps)
        solution = f"{bad}{SECOND_LOOK} {slip}. Let me do it again.\n{good}"
    elif at < 0.2:
        solution = f"{good}{SECOND_LOOK} slipped, so I check each line again.\n{good}"
    else:
        solution = good
    return Example(problem.text, opener + solution, problem.answer)


def large_problem(rng: Random) -> Problem:
    """Return one of the problems with large numbers; some draws fail and are drawn again."""
    while True:
        problem = rng.choice(LARGE)(rng)
        if problem is not None:
            return problem


def _draw(rng: Random) -> Problem:
    pool = LARGE if rng.random() < 0.25 else SMALL
    while True:
        problem = rng.choice(pool)(rng)
        if problem is not None:
            return problem


def _line(step: Step) -> str:
    return f"{step.text}: {step.left} {step.op} {step.right} = {step.result}."


def _wrong_try(rng: Random, steps: list[Step]) -> tuple[str, str]:
    """Return the solution up to one wrong line, taken for the answer; and what the slip was."""
    at = rng.randrange(len(steps))
    wrong = steps[at]
    result = step(wrong.left, wrong.op, wrong.right) + rng.choice([-10, -2, -1, 1, 2, 10])
    lines = [*map(_line, steps[:at])]
    lines.append(f"{wrong.text}: {wrong.left} {wrong.op} {wrong.right} = {result}.")
    lines.append(f"The answer is {result}.")
    return "\n".join(lines), SLIPS[wrong.op]
