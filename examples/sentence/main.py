"""Words into a sentence: states of your own, and the model only says how likely a text is."""

from __future__ import annotations

import argparse

import weft
from weft import search

WORDS = ("a", "Vera", "duck", "lived", "meadow", "named", "near", "the", "wise")
State = tuple[str, ...]


def propose(state: State) -> list[tuple[str, State]]:
    """Take any of the words that are left."""
    return [(f" {word}", tuple(w for w in state if w != word)) for word in state]


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    start = weft.Loom(lm, "Once upon a time", template=False)
    result = search.beam(
        lm,
        start,
        state=WORDS,
        propose=propose,
        verifier=lambda state: not state,
        width=12,
        depth=len(WORDS),
    )
    for name, words in (("given", " ".join(WORDS)), ("best", result.text.strip())):
        logprob = sum(start.measure(f" {words}").logprobs)
        print(f"{name + ':':6} Once upon a time {words}, logprob {logprob:.1f}")
    print(f"{result.cost.candidates} candidates scored, {result.cost.tokens} tokens generated")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
