"""The cost of constraints: records of a JSON schema at temperature 1.5, with and without.

One run: the same prompts and seeds, a table and one JSON line; `valid` is what a JSON-schema
validator of its own says of the texts.
"""

from __future__ import annotations

import argparse
import json
import time

from common import reach_recipe, report, table  # noqa: F401

import weft
from weft.constraints import JsonSchema

reach_recipe()
from recipe.corpus.vocabulary import ANIMALS, COLORS, PLACES, TRAITS  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "animal": {"enum": sorted(ANIMALS)},
        "age": {"type": "integer", "minimum": 1, "maximum": 12},
        "color": {"enum": sorted(COLORS)},
        "traits": {
            "type": "array",
            "items": {"enum": sorted(TRAITS)},
            "minItems": 1,
            "maxItems": 3,
        },
        "home": {"enum": sorted(PLACES)},
    },
    "required": ["name", "animal", "age", "color", "traits", "home"],
    "additionalProperties": False,
}


def is_valid(text: str) -> bool:
    """Return True if a text is a record of the schema, by a validator that is not ours."""
    from jsonschema import ValidationError, validate

    try:
        validate(json.loads(text), SCHEMA)
    except (ValueError, ValidationError):
        return False
    return True


def records(lm: weft.LM, n: int, **sampling: object) -> tuple[list[str], float]:
    """Return n records' texts, 100 at a time, and the seconds they took."""
    texts: list[str] = []
    began = time.perf_counter()
    while len(texts) < n:
        loom = weft.Loom(lm, weft.samples.record)
        nodes = loom.grow(
            n=min(100, n - len(texts)),
            max_tokens=120,
            temperature=1.5,
            seed=len(texts),
            show=False,
            **sampling,
        )
        texts += [node.text for node in nodes]
    return texts, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    options = parser.parse_args()
    rows = []
    for name, sampling in (("none", {}), ("JSON schema", {"constraint": JsonSchema(SCHEMA)})):
        lm = weft.load("tiny")
        records(lm, 10, **sampling)  # the schema is compiled once
        steps, decoded = lm.stats().steps, lm.stats().decoded
        texts, seconds = records(lm, options.records, **sampling)
        stats = lm.stats()
        rows.append(
            {
                "constraint": name,
                "records": len(texts),
                "valid": sum(map(is_valid, texts)),
                "tok/s": round((stats.decoded - decoded) / seconds),
                "steps": stats.steps - steps,
                "s": round(seconds, 2),
            }
        )
        lm.close()
    report("constraints", rows, temperature=1.5)


if __name__ == "__main__":
    main()
