"""Three faces on one tree: a loom, branches and awaited log-probabilities share every prefix."""

from __future__ import annotations

import argparse
import asyncio

import weft
from weft import AsyncLM, Branch, Loom, samples


def main(model: str = "tiny") -> None:
    lm = weft.load(model)

    # A reasoning tree: four first steps, one prefill, one batch.
    loom = Loom(lm, samples.game24)
    steps = loom.grow(n=4, max_tokens=24, stop="\n", seed=1, show=False)
    best = max(steps, key=lambda step: step.mean_logprob)
    print("loom:   ", best.text.strip())

    # Decode state: a branch from the same prefix. Nothing of it is computed again.
    before = lm.stats().prefilled
    branch = Branch.create(lm, temperature=0.0)
    branch.prefill(best.get_prefix_tokens())
    for _ in branch:
        if "\n" in branch.text:
            break
    print("branch: ", branch.text.strip())

    # Log-probabilities of every prefix of that path, awaited together: one step.
    model, path = AsyncLM(lm), branch.tokens
    prefixes = [path[: n + 1] for n in range(len(path))]
    logprobs = asyncio.run(model.batch_next_token_logprobs(prefixes))
    surest = float(logprobs[:-1].max(axis=1).mean())
    print(
        f"asynclm: {len(logprobs)} prefixes; log-probability of the likeliest token: {surest:.2f}"
    )
    computed = lm.stats().prefilled - before
    # With two caches the branch would prefill all that it now finds, and AsyncLM the full path.
    separately = len(best.get_prefix_tokens()) + len(path)
    print(f"prefilled for branch and asynclm: {computed}; with a cache each: {separately}")
    print(lm.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
