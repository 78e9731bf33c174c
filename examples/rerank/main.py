"""Rerank by log-odds: one question for each candidate, all over one shared prefix."""

from __future__ import annotations

import argparse

import weft
from weft import Branch, BranchStore

CANDIDATES = ["4 4 10", "1 1 1", "8 3 1", "2 2 2", "6 6 2"]


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    store = BranchStore(lm)
    marker = "CANDIDATE"
    shown = lm.format_chat([{"role": "user", "content": f"Can {marker} make 24?"}])
    head, tail = shown.split(marker)

    # The prompt up to the candidate is run once; each candidate is a fork of it.
    trunk = Branch.create(lm)
    trunk.prefill(lm.tokenize(head.rstrip(), special=True, add_bos=False))
    forks = [trunk.fork(clone_logits=False) for _ in CANDIDATES]
    text = lm.text.continuation
    store.prefill(
        [
            (fork, text(f" {candidate}") + text(tail, special=True))
            for fork, candidate in zip(forks, CANDIDATES, strict=True)
        ]
    )
    yes, no = (lm.tokenize(word, add_bos=False)[0] for word in ("sure", "impossible"))
    scored = []
    for fork, candidate in zip(forks, CANDIDATES, strict=True):
        logits = fork.logits
        scored.append((float(logits[yes] - logits[no]), candidate))
    for score, candidate in sorted(scored, reverse=True):
        print(f"{score:+6.2f}  {candidate}")
    trunk.prune_subtree()
    print(lm.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
