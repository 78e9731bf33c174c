"""Game of 24 on the 100 held-out puzzles: every search, at the library's own numbers.

    python benchmarks/game24.py                  all puzzles
    python benchmarks/game24.py --puzzles 20     every fifth
    python benchmarks/game24.py --only adaptive --seed 1
    python benchmarks/game24.py --tuning         60 others, to choose numbers on
    python -m recipe.train_reward --out reward && python benchmarks/game24.py --reward reward
                                                 searches that follow a process reward model

The tuning puzzles have targets from 10 to 60 but 24. None is a held-out one; others of 24 are of no
use, for the model was trained on them and writes 40 of 40 down at once.
Each puzzle is one call, alone, from an empty cache. `solved` counts answers whose last line uses
exactly the given numbers and makes 24, by the checker of the training recipe, which shares no code
with the one the search uses. Best of n gets 40 samples: about the tokens that the tree takes.
"checked" picks a right answer if there is one among them, as the tree does among its five best
paths; "majority" votes on the answers unseen.

`tokens` are all generated ones, rejected and repeated lines included; adaptive generates a line
once, and measures it to draw it again without the model. `read` are all other tokens
that the model computed: the prompt, prompts for single steps, and the questions for its own
verdicts. `reward tokens` are those that the reward model computed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

from common import median, reach_recipe, report

import weft
from weft.search import (
    Game24,
    RewardModel,
    SearchResult,
    adaptive,
    beam,
    best_of_n,
    dvts,
    greedy,
    mcts,
    rebase,
    smc,
    tot,
    weighted_best_of_n,
)

reach_recipe()
from recipe.corpus.game24 import can_reach, count_ways, holdout24, solves  # noqa: E402

Strategy = Callable[[weft.LM, str, int], SearchResult]
N_SAMPLES = 40
N_HARD = 30
N_TUNING = 60
STRATEGIES: dict[str, Strategy] = {
    "greedy": lambda lm, prompt, seed: greedy(lm, prompt),
    f"best of {N_SAMPLES}, majority": lambda lm, prompt, seed: best_of_n(
        lm, prompt, n=N_SAMPLES, extract=last_line, checked=False, seed=seed
    ),
    f"best of {N_SAMPLES}, checked": lambda lm, prompt, seed: best_of_n(
        lm, prompt, n=N_SAMPLES, seed=seed
    ),
    "best of 18, checked": lambda lm, prompt, seed: best_of_n(lm, prompt, n=18, seed=seed),
    "beam": lambda lm, prompt, seed: beam(lm, prompt, seed=seed),
    "smc": lambda lm, prompt, seed: smc(lm, prompt, seed=seed),
    "mcts": lambda lm, prompt, seed: mcts(lm, prompt, seed=seed),
    "adaptive": lambda lm, prompt, seed: adaptive(lm, prompt, seed=seed),
    "tot": lambda lm, prompt, seed: tot(lm, prompt, seed=seed),
    "tot, depth first": lambda lm, prompt, seed: tot(lm, prompt, order="dfs", seed=seed),
}
# The same with a reward model's scores, by name.
REWARDED: dict[str, Callable[[weft.LM, str, int, RewardModel], SearchResult]] = {
    "weighted best of 18": lambda lm, prompt, seed, reward: weighted_best_of_n(
        lm, prompt, n=18, extract=last_line, checked=False, seed=seed, value=reward
    ),
    "beam, reward": lambda lm, prompt, seed, reward: beam(lm, prompt, seed=seed, value=reward),
    "dvts": lambda lm, prompt, seed, reward: dvts(
        lm, prompt, trees=4, width=8, seed=seed, value=reward
    ),
    "rebase": lambda lm, prompt, seed, reward: rebase(
        lm, prompt, width=32, seed=seed, value=reward
    ),
    "tot, reward": lambda lm, prompt, seed, reward: tot(lm, prompt, seed=seed, value=reward),
    "adaptive, reward": lambda lm, prompt, seed, reward: adaptive(
        lm, prompt, seed=seed, value=reward
    ),
}


def main() -> None:
    options = arguments()
    puzzles = tuning() if options.tuning else some(holdout(), options.puzzles)
    rows = []
    with weft.load(options.model, engine=options.engine) as lm:
        reward = options.reward and RewardModel.load(options.reward, chat=True, n_ctx=512)
        for name in options.only or (REWARDED if reward else STRATEGIES):
            rows.append(measure(lm, name, puzzles, options.seed, reward))
        engine = lm.info.name
    report(
        "game24",
        rows,
        model=options.model,
        engine=engine,
        puzzles=len(puzzles),
        seed=options.seed,
    )


def measure(
    lm: weft.LM, name: str, puzzles: Sequence[Game24], seed: int, reward: RewardModel | None
) -> dict[str, object]:
    """Run one strategy over the puzzles; return its row."""
    solved, tokens, seconds = set[Game24](), [], []
    n_read, n_rewarded = read_tokens(lm), 0 if reward is None else reward.n_tokens
    hard = set(holdout()[-N_HARD:]) & set(puzzles)
    for puzzle in puzzles:
        lm.clear_cache()
        start = time.perf_counter()
        if name in REWARDED:
            assert reward is not None
            result = REWARDED[name](lm, puzzle.prompt, seed, reward)
        else:
            result = STRATEGIES[name](lm, puzzle.prompt, seed)
        seconds.append(time.perf_counter() - start)
        tokens.append(result.cost.tokens)
        if solves(result.text, puzzle.numbers, puzzle.target):
            solved.add(puzzle)
        result.loom.close()
    return {
        "strategy": name,
        "solved": len(solved),
        "of": len(puzzles),
        f"hard {N_HARD}": len(solved & hard),
        "tokens a puzzle": fmean(tokens),
        "most tokens": max(tokens),
        "read a puzzle": (read_tokens(lm) - n_read) / len(puzzles),
        "reward tokens a puzzle": 0.0
        if reward is None
        else (reward.n_tokens - n_rewarded) / len(puzzles),
        "median s a puzzle": median(seconds),
        "mean s a puzzle": fmean(seconds),
    }


def read_tokens(lm: weft.LM) -> int:
    """Return the number of tokens that the model has computed so far without generating them."""
    stats = lm.stats()
    return stats.prefilled + stats.recomputed


def last_line(text: str) -> str:
    """Return the answer as it was written: votes are on expressions, for all of them say 24."""
    return text.rsplit("\n", 1)[-1]


def holdout() -> list[Game24]:
    """Return the puzzles kept from training; nothing is ever chosen by them."""
    return [Game24(numbers) for numbers in holdout24()]


def tuning() -> list[Game24]:
    """Return 60 puzzles of other targets: every fourth of 240 drawn, from many ways to few."""
    rng, drawn = Random("tuning"), list[Game24]()
    while len(drawn) < 4 * N_TUNING:
        numbers = tuple(sorted(rng.randint(1, 13) for _ in range(4)))
        target = rng.randint(10, 60)
        if target != 24 and can_reach(numbers, target):
            drawn.append(Game24(numbers, target))
    drawn.sort(key=lambda p: (-count_ways(p.numbers, p.target), p.numbers, p.target))
    return drawn[2::4]


def some(puzzles: Sequence[Game24], n: int) -> Sequence[Game24]:
    """Return `n` of the puzzles, evenly spaced: they are in order of difficulty."""
    return [puzzles[i * len(puzzles) // n] for i in range(n)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Game of 24 on held-out puzzles")
    parser.add_argument("--puzzles", type=int, default=100, choices=range(1, 101), metavar="N")
    parser.add_argument("--tuning", action="store_true")
    parser.add_argument(
        "--only", action="append", choices=[*STRATEGIES, *REWARDED], metavar="STRATEGY"
    )
    parser.add_argument("--reward", metavar="FOLDER", help="a model of recipe.train_reward")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
