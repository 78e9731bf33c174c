"""A task of your own in 20 lines: word problems whose arithmetic is checked line by line."""

from __future__ import annotations

import argparse
import re

import weft
from weft import samples, search

SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
MAKE = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


class WordProblem(search.Task):
    """Knows what is wrong, not what is right: a line whose sum does not hold is not followed."""

    n_continue = 4

    def state(self, lines: tuple[str, ...]) -> tuple[str, ...] | None:
        return lines if not lines or self.holds(lines[-1]) else None

    def is_solved(self, text: str) -> bool:
        return "The answer is" in text and self.holds(text)

    def holds(self, text: str) -> bool:
        return all(MAKE[op](int(a), int(b)) == int(c) for a, op, b, c in SUM.findall(text))


def main(model: str = "tiny") -> None:
    lm, task = weft.load(model), WordProblem()
    hot = {"temperature": 1.6, "seed": 3}

    loom = weft.Loom(lm, samples.large_problem)
    answers = loom.grow(n=24, **hot)
    n_right = sum(search.answer_number(node.text) == "1216" for node in answers)
    n_tokens = sum(len(node.tokens) for node in answers)
    print(f"{n_right} of {len(answers)} samples have the right answer, {n_tokens} tokens")

    result = search.tot(
        lm,
        samples.large_problem,
        task=task,
        order="dfs",
        breadth=2,
        max_tokens=60,
        budget_tokens=2000,
        **hot,
    )
    n_wrong = sum(task.state((node.text,)) is None for node in result.loom.walk())
    print(f"{n_wrong} wrong lines were not continued")
    print(result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
