"""Game of 24 by each strategy: the same puzzle, the same model, what was spent."""

from __future__ import annotations

import weft
from weft import samples, search

SEARCHES = {
    "greedy": lambda lm: search.greedy(lm, samples.game24),
    "best of n": lambda lm: search.best_of_n(lm, samples.game24, n=16, seed=1),
    "beam": lambda lm: search.beam(lm, samples.game24, seed=1),
    "tree, breadth first": lambda lm: search.tot(lm, samples.game24, seed=1),
    "tree, depth first": lambda lm: search.tot(lm, samples.game24, order="dfs", seed=1),
    "mcts": lambda lm: search.mcts(lm, samples.game24, seed=1),
    "particles": lambda lm: search.smc(lm, samples.game24, n=16, seed=1),
    "adaptive": lambda lm: search.adaptive(lm, samples.game24, seed=1),
}


def main() -> None:
    task = search.Game24.read(samples.game24)
    assert task is not None
    n_right = 0
    for name, run in SEARCHES.items():
        with weft.load("tiny") as lm:
            result = run(lm)
        answer = result.text.strip().splitlines()[-1] if result.text.strip() else ""
        is_right = task.is_solved(result.text)
        n_right += is_right
        mark = "right" if is_right else "wrong"
        print(f"{name:<20} {mark:<6} {result.cost.tokens:>6} tokens  {answer}")
    print(f"{n_right} of {len(SEARCHES)} right")


if __name__ == "__main__":
    main()
