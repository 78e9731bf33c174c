"""JSON records, for decoding under a schema."""

from __future__ import annotations

import json
from random import Random

from .example import Example
from .vocabulary import COLORS, PLACES, TRAITS, an, hero, person


def record(rng: Random) -> Example:
    """Return a request for a person's record, and the record on one line."""
    animal, name = hero(rng), person(rng).name
    fields = {
        "name": name,
        "animal": animal,
        "age": rng.randint(1, 12),
        "color": rng.choice(COLORS),
        "traits": rng.sample(TRAITS, rng.randint(1, 3)),
        "home": rng.choice(PLACES),
    }
    asks = (
        f"Describe {name} the {animal} as JSON.",
        f"Make a JSON record of {an(animal)} named {name}.",
        f"Give me JSON for {an(animal)} called {name}.",
    )
    return Example(rng.choice(asks), json.dumps(fields))
