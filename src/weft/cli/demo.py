"""`weft demo`: a word problem by majority, then a Game of 24 by tree of thoughts."""

from __future__ import annotations

import io
import re
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..viz.lanes import DeltaDisplay, Lanes, NullDisplay, show_stream
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from ..viz.text import Picture, show_votes
from . import hints, options, solve
from .failures import handle_errors
from .model import TINY, load_model

if TYPE_CHECKING:
    from ..lm.lm import LM
    from ..loom import Heddle, Loom

OPENING = "I will solve this problem step by step and be mindful of mistakes.\n"
SECOND_LOOK = (
    "\n...Wait. I need to look at the problem again. Let's think about what I could've gotten "
    "wrong. I could've"
)
N_BRANCHES, N_LOOKS = 8, 2
MAX_TOKENS = 400
TEMPERATURE, SEED = 1.2, 1


@handle_errors
def demo(as_json: options.Json = False, verbose: options.Verbose = 0) -> None:
    """Show two examples with the embedded model; no download, no GPU."""
    from .. import samples

    out = TerminalWriter.for_stream(io.StringIO() if as_json else sys.stdout)
    began = time.perf_counter()
    with load_model(TINY) as lm:
        out.line(
            ("weft demo", "bold"),
            " · the embedded model of 6.8 million parameters, on this CPU",
        )
        problem, game = word_problem(out, lm), game_of_24(out, lm)
        seconds = time.perf_counter() - began
        if as_json:
            from ..service.store.json_output import stats_object

            stats = stats_object(lm.stats())
            report = {"model": TINY, "word_problem": problem, "game_of_24": game}
            write_object({**report, "seconds": seconds, "stats": stats})
            return
        out.line()
        out.facts(str(lm.stats()), "bold")
        out.line((f"total time {seconds:.1f} s", "dim"))
    hints.suggest(
        ["weft", "run", samples.story, "-n", "4"],
        ["weft", "solve", samples.game24],
        ["weft", "doctor"],
    )


def word_problem(out: TerminalWriter, lm: LM) -> dict[str, Any]:
    """Solve a word problem 8 times, check each solution twice, and vote on the answer.

    Draws the steps, and returns the results for --json.
    """
    from .. import samples
    from ..loom import Loom
    from ..service.store.json_output import vote_objects

    out.line()
    out.line(("1  A word problem", "bold"), " · 8 branches, each checked twice, then a vote")
    out.line()
    out.block("", samples.word_problem)
    out.line()
    loom = Loom(lm, samples.word_problem)
    opening = loom.add(OPENING)
    began = time.perf_counter()
    tried = grow(out, opening, N_BRANCHES, [opening])
    looks = [node.add(SECOND_LOOK) for node in tried if node.terminal]
    checked = grow(out, opening, N_LOOKS, looks)
    seconds = time.perf_counter() - began
    numbers = {node.id: node.lineage[0] + 1 for node in tried}
    out.lines(Picture(out, numbers, top=3).lines(loom))
    out.line()
    for node in sorted(tried, key=lambda node: node.lineage):
        if (answers := second_thoughts(node.text)) is not None:
            out.line(f"  Branch {numbers[node.id]} answered {answers[0]}, later {answers[1]}.")
    out.line()
    votes = vote(out, tried + checked)
    n_tokens = sum(len(node.tokens) for node in tried + checked)
    out.line(
        (counted(n_tokens, "token"), "dim"),
        (f" in {seconds:.1f} s; the problem was read once", "dim"),
    )
    return {
        "prompt": samples.word_problem,
        "solutions": [node.text for node in tried],
        "second_looks": [node.text for node in checked],
        "votes": vote_objects(votes),
        "tokens": n_tokens,
        "seconds": seconds,
    }


def grow(out: TerminalWriter, node: Heddle, n: int, at: list[Heddle]) -> list[Heddle]:
    """Grow n branches at each of several nodes in one batch, and return them.

    A terminal shows the branches in lanes while they grow.

    Args:
        out: the output.
        node: any node of the loom; its `stream` runs the batch.
        n: number of branches of each node.
        at: the nodes.
    """
    watcher: DeltaDisplay = Lanes(out, n * len(at)) if out.is_live else NullDisplay()
    deltas = node.stream(n, at=at, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=SEED)
    if not show_stream(watcher, deltas):
        raise KeyboardInterrupt
    return [child for each in at for child in each.children if child.logprobs]


def second_thoughts(text: str) -> tuple[str, str] | None:
    """Return the first and the last answer that a text states, if they differ; else None."""
    answers = re.findall(r"The answer is (\S+)\.", text)
    return (answers[0], answers[-1]) if answers and answers[0] != answers[-1] else None


def vote(out: TerminalWriter, solutions: list[Heddle]) -> list[tuple[str, int]]:
    """Count the answers of solutions, draw bars, and return (answer, count), most votes first."""
    from ..search import answer_number

    counts = Counter(answer_number(node.text) or "none" for node in solutions)
    total = len(solutions)
    show_votes(out, counts.most_common(4), total, width=4, of=f" of {total}")
    out.line()
    out.line(("The majority says: ", ""), (counts.most_common(1)[0][0], "bold green"))
    return counts.most_common()


def game_of_24(out: TerminalWriter, lm: LM) -> dict[str, Any]:
    """Solve a Game of 24 by tree of thoughts, and redraw the tree after each level.

    Returns the results for --json.
    """
    from .. import samples
    from ..loom import Loom
    from ..search import tot
    from ..service.store.json_output import scored_path

    out.line()
    out.line(
        ("2  The Game of 24", "bold"),
        " · a tree of thoughts; the scores are the model's own",
    )
    out.line()
    loom: Loom = Loom(lm, samples.game24)
    result = solve.run_with_display(
        out, loom, lambda progress: tot(lm, loom, breadth=5, seed=SEED, progress=progress)
    )
    out.console.print(solve.picture_of(out, loom, result.best))
    out.line()
    out.line((solve.answer_of(result), "bold green"), solve.verdict(result))
    out.line((str(result.cost), "dim"))
    return {
        "prompt": samples.game24,
        "solved": result.solved,
        "path": scored_path(result.best),
        "tokens": result.cost.tokens,
    }
