"""Game of 24 by eight strategies: the same puzzle, the same model, what was spent."""

from __future__ import annotations

import argparse

import weft
from weft import samples, search

SEARCHES = {
    "greedy": lambda lm: search.greedy(lm, samples.hard24),
    "best of n": lambda lm: search.best_of_n(lm, samples.hard24, n=16, seed=1),
    "beam": lambda lm: search.beam(lm, samples.hard24, seed=1),
    "tree, breadth first": lambda lm: search.tot(lm, samples.hard24, seed=1),
    "tree, depth first": lambda lm: search.tot(lm, samples.hard24, order="dfs", seed=1),
    "mcts": lambda lm: search.mcts(lm, samples.hard24, seed=1),
    "particles": lambda lm: search.smc(lm, samples.hard24, n=16, seed=1),
    "adaptive": lambda lm: search.adaptive(lm, samples.hard24, seed=1),
}


def main(model: str = "tiny") -> None:
    task = search.Game24.read(samples.hard24)
    assert task is not None
    n_right = 0
    for name, run in SEARCHES.items():
        with weft.load(model) as lm:
            result = run(lm)
        answer = result.text.strip().splitlines()[-1] if result.text.strip() else ""
        is_right = task.is_solved(result.text)
        n_right += is_right
        mark = "right" if is_right else "wrong"
        print(f"{name:<20} {mark:<6} {result.cost.tokens:>6} tokens  {answer}")
    print(f"{n_right} of {len(SEARCHES)} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
