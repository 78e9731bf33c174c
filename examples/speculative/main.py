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


def draw(p: Probabilities, rng: np.random.Generator) -> int:
    return int(rng.choice(len(p), p=p / p.sum()))


def step(
    target: Branch, draft: Branch, last: int, rng: np.random.Generator
) -> tuple[Branch, int, int]:
    """Return the target with `last` and the accepted drafts, its next token, and their number.

    last: the next token of both branches, which has not run. The target's next one has not either:
    the pass of the next round runs it together with the drafts. The tokens are distributed as the
    target's own.
    """
    guess, tokens = draft.fork(), [last]
    beliefs: list[Probabilities] = []
    for _ in range(N_DRAFT):
        guess.prefill(tokens[-1:])
        beliefs.append(probabilities(guess))
        tokens.append(draw(beliefs[-1], rng))
    # A fork for each prefix of the tokens; together they are one path: one forward pass.
    checks = [target.fork() for _ in tokens]
    BranchStore(target.lm).prefill([(check, tokens[: n + 1]) for n, check in enumerate(checks)])
    truth = [probabilities(check) for check in checks]
    for n, token in enumerate(tokens[1:]):
        if rng.random() >= min(1.0, truth[n][token] / beliefs[n][token]):
            return checks[n], draw(np.maximum(truth[n] - beliefs[n], 0), rng), n
    return checks[-1], draw(truth[-1], rng), N_DRAFT


def main(model: str = "tiny") -> None:
    with tempfile.TemporaryDirectory() as folder:
        large, small = weft.load(model), draft_model(Path(folder), source=model)
        prompt = large.format_chat([{"role": "user", "content": samples.story}])
        target, draft = Branch.create(large), Branch.create(small)
        for branch in (target, draft):
            branch.prefill(prompt.ids)
        start, rng, n_rounds, n_accepted = target.position, np.random.default_rng(1), 0, 0
        last, before = draw(probabilities(target), rng), large.stats().steps
        while target.position - start < N_TOKENS:
            target, last, n = step(target, draft, last, rng)
            draft.prefill(target.tokens[draft.position :])
            n_rounds, n_accepted = n_rounds + 1, n_accepted + n
        generated = target.tokens[start:]
        print(f"accepted {n_accepted} of {n_rounds * N_DRAFT} drafts")
        n_passes = large.stats().steps - before
        print(f"{len(generated)} tokens in {n_passes} forward passes of the large model")
        print(large.detokenize(generated))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a folder with model.safetensors")
    main(parser.parse_args().model)
