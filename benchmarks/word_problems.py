"""Arithmetic word problems with a small real model: answers by greedy decoding, votes and searches.

    python benchmarks/word_problems.py --model FOLDER [--problems 200] [--only greedy]

Problems are generated: one or two steps, six stories with random names, things and numbers. The
prompt is a chat with a solved example of each story. A program compares the last number after
"answer is" with the result. Only searches named "checked" use that program while they run.

Eight answers are sampled once; the vote, both weighted votes and "any of 8" read the same eight.
"likelihood" weighs an answer by the geometric mean of its tokens' probabilities. "judge" weighs it
by the model's own probability of Yes to the question whether it is correct. `tokens` are generated
ones. `read tokens` are those of the questions. Several problems run at a time in one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import operator
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

from common import report

import weft
from weft.loom import Heddle
from weft.search import SearchResult, aadaptive, abeam, abest_of_n, agreedy
from weft.search.answers import answer_number
from weft.search.score import averdicts

N_SAMPLES = 8
N_STORIES = 6
_NAMES = "Anna Ben Clara David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olga Paul".split()
_THINGS = "apples marbles stamps cards coins shells pencils stickers cookies balloons".split()
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_QUESTION = (
    "{problem}\n\nA student's solution:\n{text}\n\nIs the student's solution correct?"
    " Answer Yes or No."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem with its two steps.

    Attributes:
        text: the question.
        steps: the two calculations, such as "3 + 4 = 7".
        answer: the result.
    """

    text: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """The steps and the answer, as the examples of the prompt write them."""
        return "\n".join([*self.steps, f"The answer is {self.answer}."])


def problem(rng: Random, story: int | None = None) -> Problem:
    """Return a random problem; of the story with this number, if given."""
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b, c = rng.randint(6, 12), rng.randint(2, 5), rng.randint(2, 5)
    n, k = rng.randint(2, 4), rng.randint(3, 6)
    boxes = f"{name} has {n} boxes with {k} {thing} each"
    stories: list[tuple[str, list[tuple[int, str, int]]]] = [
        (
            f"{name} has {a} {thing}. {other} gives {name} {b} more."
            f" How many {thing} does {name} have now?",
            [(a, "+", b)],
        ),
        (
            f"{name} has {a} {thing}. {name} gives {b} of them to {other}."
            f" How many {thing} does {name} have left?",
            [(a, "-", b)],
        ),
        (f"{boxes}. How many {thing} does {name} have?", [(n, "*", k)]),
        (
            f"{name} has {a} {thing}. {name} buys {b} more and gives {c} to {other}."
            f" How many {thing} does {name} have now?",
            [(a, "+", b), (a + b, "-", c)],
        ),
        (
            f"{name} has {a + b} {thing}. {name} loses {b} and gives {c} to {other}."
            f" How many {thing} does {name} have left?",
            [(a + b, "-", b), (a, "-", c)],
        ),
        (
            f"{boxes} and finds {b} more. How many {thing} does {name} have now?",
            [(n, "*", k), (n * k, "+", b)],
        ),
    ]
    text, steps = rng.choice(stories) if story is None else stories[story]
    results = [_OPERATIONS[sign](left, right) for left, sign, right in steps]
    lines = [
        f"{left} {sign} {right} = {result}"
        for (left, sign, right), result in zip(steps, results, strict=True)
    ]
    return Problem(text, tuple(lines), results[-1])


def problems(n: int, seed: str = "problems") -> list[Problem]:
    """Return n different problems."""
    rng = Random(seed)
    distinct = dict[str, Problem]()
    while len(distinct) < n:
        new = problem(rng)
        distinct.setdefault(new.text, new)
    return list(distinct.values())


def chat(question: Problem, examples: Sequence[Problem]) -> list[dict[str, Any]]:
    """Return the messages of the prompt: the examples with their solutions, and the question."""
    turns = [
        {"role": role, "content": content}
        for example in examples
        for role, content in (("user", example.text), ("assistant", example.solution))
    ]
    return [*turns, {"role": "user", "content": question.text}]


def is_right(text: str, question: Problem) -> bool:
    """Return True if the answer in a text is that of the problem."""
    return answer_number(text) == str(question.answer)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one row of the table on one problem."""

    solved: bool
    tokens: int
    read_tokens: int = 0


Method = Callable[[weft.LM, list[dict[str, Any]], Problem, int], Awaitable[dict[str, Outcome]]]


async def by_greedy(
    lm: weft.LM, prompt: list[dict[str, Any]], question: Problem, seed: int
) -> dict[str, Outcome]:
    """Return the outcome of greedy decoding."""
    return {"greedy": outcome(await agreedy(lm, prompt, max_tokens=60), question)}


async def by_samples(
    lm: weft.LM, prompt: list[dict[str, Any]], question: Problem, seed: int
) -> dict[str, Outcome]:
    """Return the outcomes of all rows that read the same sampled answers."""
    result = await abest_of_n(
        lm, prompt, n=N_SAMPLES, seed=seed, max_tokens=60, extract=answer_number
    )
    nodes = [node for vote in result.votes for node in vote.nodes]
    texts = {node: node.text.strip() for node in nodes}
    distinct = list(dict.fromkeys(texts.values()))
    questions = [_QUESTION.format(problem=question.text, text=text) for text in distinct]
    verdicts = await averdicts(lm, questions, ("Yes", "No"))
    of_text = dict(zip(distinct, verdicts.values, strict=True))
    likelihood = {node: math.exp(fmean(node.logprobs)) for node in nodes}
    n_tokens, wanted = result.cost.tokens, str(question.answer)

    def won(weights: dict[Heddle, float]) -> bool:
        sums = Counter[Hashable]()
        for vote in result.votes:
            sums[vote.answer] = math.fsum(weights[node] for node in vote.nodes)
        return bool(sums) and sums.most_common(1)[0][0] == wanted

    outcomes = {
        f"majority of {N_SAMPLES}": Outcome(is_right(result.text, question), n_tokens),
        f"weighted best of {N_SAMPLES}, likelihood": Outcome(won(likelihood), n_tokens),
        f"weighted best of {N_SAMPLES}, judge": Outcome(
            won({node: of_text[texts[node]] for node in nodes}), n_tokens, verdicts.n_tokens
        ),
        f"any of {N_SAMPLES} is right": Outcome(
            any(vote.answer == wanted for vote in result.votes), n_tokens
        ),
    }
    result.loom.close()
    return outcomes


async def by_beam(
    lm: weft.LM, prompt: list[dict[str, Any]], question: Problem, seed: int
) -> dict[str, Outcome]:
    """Return the outcome of beam search over lines."""
    result = await abeam(
        lm, prompt, width=4, n=4, depth=4, max_tokens=24, answer_tokens=24, seed=seed
    )
    return {"beam": outcome(result, question)}


async def by_adaptive(
    lm: weft.LM, prompt: list[dict[str, Any]], question: Problem, seed: int
) -> dict[str, Outcome]:
    """Return the outcome of adaptive search that follows the likelihood."""
    result = await aadaptive(
        lm, prompt, rounds=12, depth=4, max_tokens=24, answer_tokens=40, seed=seed
    )
    return {"adaptive": outcome(result, question)}


async def by_checked_adaptive(
    lm: weft.LM, prompt: list[dict[str, Any]], question: Problem, seed: int
) -> dict[str, Outcome]:
    """Return the outcome of adaptive search that ends at a right answer."""
    result = await aadaptive(
        lm,
        prompt,
        rounds=12,
        depth=4,
        max_tokens=24,
        answer_tokens=40,
        seed=seed,
        verifier=lambda text: is_right(text, question),
    )
    return {"adaptive, checked": outcome(result, question)}


def outcome(result: SearchResult, question: Problem) -> Outcome:
    """Return the outcome of a search, and free its tree."""
    result.loom.close()
    return Outcome(is_right(result.text, question), result.cost.tokens, result.cost.prompt_tokens)


METHODS: dict[str, Method] = {
    "greedy": by_greedy,
    "samples": by_samples,
    "beam": by_beam,
    "adaptive": by_adaptive,
    "adaptive-checked": by_checked_adaptive,
}


async def measure(
    lm: weft.LM, method: Method, questions: Sequence[Problem], options: argparse.Namespace
) -> list[dict[str, object]]:
    """Run one method on all problems; return a row per name that it reports."""
    rng = Random("examples")
    examples = [problem(rng, story) for story in range(N_STORIES)]
    gate = asyncio.Semaphore(options.concurrent)

    async def solve(question: Problem) -> dict[str, Outcome]:
        async with gate:
            return await method(lm, chat(question, examples), question, options.seed)

    start = time.process_time()
    outcomes = await asyncio.gather(*map(solve, questions))
    seconds = time.process_time() - start
    return [
        {
            "method": name,
            "solved": sum(each[name].solved for each in outcomes),
            "of": len(outcomes),
            "tokens a problem": fmean(each[name].tokens for each in outcomes),
            "read tokens a problem": fmean(each[name].read_tokens for each in outcomes),
            "CPU s a problem": seconds / len(outcomes),
        }
        for name in outcomes[0]
    ]


def main() -> None:
    options = arguments()
    every = problems(200)
    questions = [every[i * 200 // options.problems] for i in range(options.problems)]
    rows = []
    with weft.load(options.model, engine=options.engine, dtype="float32") as lm:
        for name in options.only or METHODS:
            new = asyncio.run(measure(lm, METHODS[name], questions, options))
            print(*new, sep="\n", flush=True)
            rows += new
        engine = lm.info.name
    report("word_problems", rows, model=options.model, engine=engine, seed=options.seed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Arithmetic word problems with a real model")
    parser.add_argument("--problems", type=int, default=200, choices=range(1, 201), metavar="N")
    parser.add_argument("--only", action="append", choices=METHODS)
    parser.add_argument("--model", required=True, help="a folder, such as that of SmolLM2")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--concurrent", type=int, default=32, help="problems at a time; 32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
