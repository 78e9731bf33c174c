"""Speculative decoding: a small model drafts, the large one checks all drafts in one forward."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from draft import draft_model
from numpy.typing import NDArray

import weft
from weft import Branch, BranchStore, samples

Probabilities = NDArray[np.float64]
N_DRAFT, N_TOKENS = 4, 40


def probabilities(branch: Branch) -> Probabilities:
    logits = branch.logits.astype(np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def step(target: Branch, draft: Branch, rng: np.random.Generator) -> tuple[list[int], int]:
    """Return new tokens, distributed as the target's own, and how many drafts were accepted."""
    drafted: list[int] = []
    beliefs: list[Probabilities] = []
    guess = draft.fork()
    for _ in range(N_DRAFT):
        beliefs.append(probabilities(guess))
        drafted.append(int(rng.choice(len(beliefs[-1]), p=beliefs[-1])))
        guess.commit(drafted[-1])
    # A fork for each draft prefix; together they are one path, so one forward runs them all.
    checks = [target.fork() for _ in range(N_DRAFT)]
    prefixes = [drafted[: n + 1] for n in range(N_DRAFT)]
    BranchStore(target.lm).prefill(list(zip(checks, prefixes, strict=True)))
    truth = [probabilities(branch) for branch in (target, *checks)]
    for n, token in enumerate(drafted):
        if rng.random() >= min(1.0, truth[n][token] / beliefs[n][token]):
            left = np.maximum(truth[n] - beliefs[n], 0)
            return [*drafted[:n], int(rng.choice(len(left), p=left / left.sum()))], n
    return [*drafted, int(rng.choice(len(truth[-1]), p=truth[-1]))], N_DRAFT


def main(model: str = "tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        large, small = weft.load(model), draft_model(Path(folder), source=model)
        shown = large.format_chat([{"role": "user", "content": samples.story}])
        target, draft = Branch.create(large), Branch.create(small)
        for branch in (target, draft):
            branch.prefill(large.tokenize(shown, special=True, add_bos=False))
        start, rng, steps, accepted = target.position, np.random.default_rng(1), 0, 0
        while target.position - start < N_TOKENS:
            tokens, n = step(target, draft, rng)
            for branch in (target, draft):
                branch.prefill(tokens)  # the target's KV of accepted drafts is there already
            steps, accepted = steps + 1, accepted + n
        generated = target.tokens[start:]
        print(f"accepted {accepted} of {steps * N_DRAFT} drafts")
        print(f"{len(generated)} tokens in {steps} forward passes of the large model")
        print(large.detokenize(generated))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a folder with model.safetensors")
    main(parser.parse_args().model)
