"""SMC with a constraint on a real model."""

from __future__ import annotations

from collections import Counter

import pytest

import weft
from real_models import SMOLLM2_FOLDER, real_model
from weft import search
from weft.constraints import Choice, Regex

pytestmark = pytest.mark.models
CITIES = "Athens Berlin Cairo Dublin Lisbon London Madrid Moscow Oslo Paris Rome Vienna".split()


QUESTION = "What is the capital of Italy?"


def shares(result: search.SearchResult) -> Counter[str]:
    total = Counter[str]()
    for particle in result.particles:
        total[particle.text] += particle.weight
    return total


def test_choice_of_cities_gives_mostly_the_capital() -> None:
    """p(Rome | list) is 0.87. Drawn by token, one draw in 30 is Rome and half are London."""
    with weft.load(real_model(SMOLLM2_FOLDER), engine="numpy") as lm:
        for seed in range(3):
            result = search.smc(lm, QUESTION, depth=1, seed=seed, constraint=Choice(CITIES))
            assert shares(result)["Rome"] > 0.8
            assert result.text == "Rome"
        by_token = search.smc(
            lm, QUESTION, n=128, depth=1, seed=0, constraint=Regex("|".join(CITIES))
        )
    draws = Counter(node.text for node in by_token.loom.children)
    assert draws["London"] > 5 * draws["Rome"] > 0
    assert shares(by_token)["Rome"] > 0.75
    assert by_token.text == "Rome"
