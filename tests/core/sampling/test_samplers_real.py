"""DRY, XTC and top-nσ on a real model."""

from __future__ import annotations

import pytest

import weft
from real_models import SMOLLM2_FOLDER, real_model

pytestmark = pytest.mark.models
PROMPT = "The owl of the mill has three rules. The first rule is"


def n_repeated(tokens: list[int], n: int = 8) -> int:
    """Return how many sequences of n tokens occur again later."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(grams) - len(set(grams))


def test_dry_ends_the_repetitions_of_greedy_text() -> None:
    with weft.load(real_model(SMOLLM2_FOLDER), engine="numpy") as lm:
        loom = weft.Loom(lm, PROMPT, template=False)
        (plain,) = loom.grow(temperature=0, max_tokens=80)
        (dry,) = loom.grow(temperature=0, max_tokens=80, dry_multiplier=0.8)
        assert n_repeated(plain.tokens) > 4
        assert n_repeated(dry.tokens) == 0


def test_top_n_sigma_bounds_surprisal_at_a_high_temperature_and_xtc_raises_it() -> None:
    """At temperature 2 without a filter most tokens are noise, of more than 6 nats on average."""

    def surprisal(**options: float) -> float:
        nodes = loom.grow(n=4, max_tokens=16, seed=1, show=False, **options)
        values = [-value for node in nodes for value in node.logprobs]
        return sum(values) / len(values)

    with weft.load(real_model(SMOLLM2_FOLDER), engine="numpy") as lm:
        loom = weft.Loom(lm, PROMPT, template=False)
        assert surprisal(temperature=2.0) > 6
        assert surprisal(temperature=2.0, top_n_sigma=1.0) < 4
        assert surprisal(min_p=0.05, xtc_probability=1.0) > surprisal(min_p=0.05) + 0.3
