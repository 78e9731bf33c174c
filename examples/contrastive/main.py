"""Contrastive decoding: what the prompt adds to what the model would say anyway."""

from __future__ import annotations

import argparse

import numpy as np

import weft
from weft import Branch, BranchStore, samples

ALPHA, PLAUSIBLE = 0.5, 0.1


def start(lm: weft.LM, text: str) -> Branch:
    prompt = lm.format_chat([{"role": "user", "content": text}])
    branch = Branch.create(lm, temperature=0.0)
    branch.prefill(lm.tokenize(prompt, special=True, add_bos=False))
    return branch


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    store = BranchStore(lm)
    expert = start(lm, samples.story)
    amateur = start(lm, "Tell me a story.")  # the same without what makes it special
    plain = expert.fork()
    for _ in range(40):
        # Only among what the expert itself finds plausible, as the method asks for.
        raw = expert.logits
        banned = np.flatnonzero(raw < raw.max() + np.log(PLAUSIBLE))
        expert.steer({int(token): -np.inf for token in banned})
        store.merge_logits(expert, [amateur], -ALPHA)
        piece, usual = expert.produce(), plain.produce()
        if piece.is_stop:
            break
        # Both histories get the token that was chosen, in one forward.
        pairs = [(expert, piece.token), (amateur, piece.token)]
        store.commit(pairs if usual.is_stop else [*pairs, (plain, usual.token)])
    print("greedy:     ", plain.text)
    print("contrastive:", expert.text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
