"""SMC with a constraint on a real model."""

from __future__ import annotations

from collections import Counter

import pytest

import weft
from real_models import SMOLLM2_FOLDER, real_model
from weft import search
from weft.constraints import Choice

pytestmark = pytest.mark.models
CITIES = "Athens Berlin Cairo Dublin Lisbon London Madrid Moscow Oslo Paris Rome Vienna".split()


def test_choice_of_cities_weighs_the_capital_most() -> None:
    """p(Rome | list) is 0.87. One draw in 30 is Rome, every second one is London."""
    with weft.load(real_model(SMOLLM2_FOLDER), engine="numpy") as lm:
        found = search.smc(
            lm, "What is the capital of Italy?", n=128, depth=1, seed=0, constraint=Choice(CITIES)
        )
    draws = Counter(node.text for node in found.loom.children)
    assert draws["London"] > 10 * draws["Rome"] > 0
    shares = Counter[str]()
    for particle in found.particles:
        shares[particle.text] += particle.weight
    assert shares["Rome"] > 0.75
    assert found.text == "Rome"
