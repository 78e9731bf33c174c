"""Answer, look at the answer again, and keep the revision that the most branches agree on."""

from __future__ import annotations

import argparse
from collections import Counter

import weft
from weft import samples

DOUBT = "Wait. I need to look at the problem again."


def last_number(text: str) -> str:
    digits = "".join(c if c.isdigit() else " " for c in text).split()
    return digits[-1] if digits else "none"


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    loom = weft.Loom(lm, samples.word_problem)
    drafts = loom.grow(n=6, max_tokens=220, temperature=1.6, seed=2, show=False)
    print("drafts:   ", dict(Counter(last_number(draft.text) for draft in drafts)))

    # Every draft gets a doubt: a text child, then three revisions of each, in one batch.
    doubts = [draft.add("\n" + DOUBT + "\n") for draft in drafts]
    revised = loom.grow(n=3, at=doubts, max_tokens=220, temperature=0.5, seed=3, show=False)
    votes = Counter(last_number(branch.text) for branch in revised if branch.text.strip())
    print("revisions:", dict(votes))
    answer, n = votes.most_common(1)[0]
    print(f"answer: {answer} ({n} of {votes.total()})")
    print(lm.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
