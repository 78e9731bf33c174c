"""Entropy as a control signal: cool where the model is sure, free elsewhere (EDT sampling)."""

from __future__ import annotations

import argparse

import weft
from weft import Branch, BranchStore, samples, search

N, MAX_TOKENS = 16, 110
T0, BASE, THETA = 1.6, 0.8, 1.5


def temperature(entropy: float) -> float:
    return max(T0 * BASE ** (THETA / max(entropy, 0.1)), 0.01)


def decode(lm: weft.LM, text: str, *, by_entropy: bool) -> list[Branch]:
    """Draw N answers, all in one batch."""
    prompt = lm.format_chat([{"role": "user", "content": text}])
    root = Branch.create(lm, temperature=T0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    root.prefill(lm.tokenize(prompt, special=True, add_bos=False))
    store, branches = BranchStore(lm), [root.fork() for _ in range(N)]
    going = list(branches)
    for _ in range(MAX_TOKENS):
        if by_entropy:
            for branch in going:
                # The random stream and the penalty counts go on: only the temperature changes.
                branch.set_sampler_params(temperature=temperature(branch.model_entropy()))
        drawn = [(b, p) for b, p in zip(going, store.produce(going), strict=True) if not p.is_stop]
        store.commit([(branch, piece.token) for branch, piece in drawn])
        going = [branch for branch, _ in drawn]
        if not going:
            break
    return branches


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    for by_entropy in (False, True):
        texts = [branch.text for branch in decode(lm, samples.large_problem, by_entropy=by_entropy)]
        right = sum(search.answer_number(text) == "1216" for text in texts)
        name = "temperature by entropy" if by_entropy else f"temperature {T0} fixed "
        print(f"{name}  {right} of {N} right, {len(set(texts))} different texts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
