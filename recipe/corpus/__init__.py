"""Synthetic corpus of the embedded model: every text is generated here, none is downloaded.

A text is an exchange (what a user asks, what the model answers) or, without a user, plain prose.
Same seed, same texts; the standard library is all it needs.
"""

from __future__ import annotations

from random import Random

from .assistance import assistance
from .example import Example
from .game24 import make24, propose, value
from .records import record
from .stories import plain_story, story
from .sums import plain_sum
from .word_problems import word_problem

__all__ = ["FAMILIES", "Example", "render", "sample"]

# Share of the corpus, and who makes it. The rest, if rounding leaves one, is word problems.
FAMILIES = (
    (0.32, word_problem),
    (0.28, make24),
    (0.12, value),
    (0.06, propose),
    (0.09, story),
    (0.04, plain_story),
    (0.04, record),
    (0.03, plain_sum),
    (0.02, assistance),
)


def sample(rng: Random) -> Example:
    """Return one text, its family drawn by share."""
    at = rng.random()
    for share, make in FAMILIES:
        if at < share:
            return make(rng)
        at -= share
    return word_problem(rng)


def render(example: Example) -> str:
    """Return the text with its control tokens, as the chat template would write it."""
    if example.user is None:
        return f"<|bos|>{example.assistant}<|end|>"
    return f"<|bos|><|user|>{example.user}<|end|><|assistant|>{example.assistant}<|end|>"
