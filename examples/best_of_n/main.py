"""Best of n with branches in lockstep: ended ones keep their score, the likeliest text wins."""

from __future__ import annotations

import argparse
import math

import weft
from weft import Branch, BranchStore, samples

N, MAX_TOKENS = 8, 80


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    store = BranchStore(lm)
    prompt = lm.format_chat([{"role": "user", "content": samples.story}])
    root = Branch.create(lm, temperature=1.2, seed=1)
    root.prefill(lm.tokenize(prompt, special=True, add_bos=False))

    branches = [root.fork() for _ in range(N)]
    going = list(branches)
    for _ in range(MAX_TOKENS):
        # Run all branches that have not ended in one forward pass. Ended ones keep their scores.
        drawn = [(b, p) for b, p in zip(going, store.produce(going), strict=True) if not p.is_stop]
        store.commit([(branch, piece.token) for branch, piece in drawn])
        going = [branch for branch, _ in drawn]
        if not going:
            break
    average = sum(math.log(branch.perplexity) for branch in branches) / N
    best = min(branches, key=lambda branch: branch.perplexity)
    print(f"one sample on average: perplexity {math.exp(average):.2f}")
    print(f"best of {N}:             perplexity {best.perplexity:.2f}")
    store.retain_only(best)
    print(best.text)
    print(lm.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
