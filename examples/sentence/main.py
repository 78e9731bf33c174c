"""Words into a sentence: states of your own, and the model only says how likely a text is."""

from __future__ import annotations

import weft
from weft import search

WORDS = ("a", "Vera", "duck", "lived", "meadow", "named", "near", "the", "wise")
State = tuple[str, ...]


def propose(state: State) -> list[tuple[str, State]]:
    """Take any of the words that are left."""
    return [(f" {word}", tuple(w for w in state if w != word)) for word in state]


def main() -> None:
    lm = weft.load("tiny")
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
    print(f"{result.cost.candidates} texts read, {result.cost.tokens} tokens written")
    print("Once upon a time", result.text)


if __name__ == "__main__":
    main()
