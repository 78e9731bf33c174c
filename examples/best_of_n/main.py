"""Best of n with branches in lockstep: finished ones stay, the likeliest wins."""

from __future__ import annotations

import weft
from weft import Branch, BranchStore, samples

N, MAX_TOKENS = 5, 60


def main() -> None:
    lm = weft.load("tiny")
    store = BranchStore(lm)
    prompt = lm.format_chat([{"role": "user", "content": samples.story}])
    root = Branch.create(lm, temperature=0.9, seed=1)
    root.prefill(lm.tokenize(prompt, special=True, add_bos=False))

    branches = [root.fork() for _ in range(N)]
    going = list(branches)
    for _ in range(MAX_TOKENS):
        # Draw on all, run all that go on in one forward. Those that ended keep their scores.
        drawn = [(b, p) for b, p in zip(going, store.produce(going), strict=True) if not p.is_stop]
        store.commit([(branch, piece.token) for branch, piece in drawn])
        going = [branch for branch, _ in drawn]
        if not going:
            break
    for branch in branches:
        print(f"perplexity {branch.perplexity:.2f}  {branch.text[:60]!r}")
    best = min(branches, key=lambda branch: branch.perplexity)
    store.retain_only(best)
    print("best:", best.text)
    print(lm.stats())


if __name__ == "__main__":
    main()
