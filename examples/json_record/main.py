"""JSON with a checker: many answers at once, and the fullest of those that match the request."""

from __future__ import annotations

import argparse
import json

import weft
from weft import search

REQUESTED = {"name": "Lena", "animal": "owl"}


def check(text: str) -> bool:
    """Return True if the text is a record of what was requested."""
    try:
        record = json.loads(text)
        return REQUESTED.items() <= record.items() and 1 <= int(record["age"]) <= 12
    except (ValueError, TypeError, AttributeError, KeyError):
        return False


def fullness(text: str) -> float:
    """A longer record is a better one."""
    return len(text)


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    prompt = "Describe Lena the owl as JSON."
    result = search.best_of_n(
        lm, prompt, n=12, temperature=1.6, seed=1, verifier=check, value=fullness
    )
    right = [node for node in result.loom.children if node.meta["solved"]]
    fails = [node for node in result.loom.children if not node.meta["solved"]]
    print(f"{len(right)} of {len(result.loom.children)} pass")
    if fails:
        print("one that fails:", fails[0].text)
    if right:
        print("the best that passes:", result.text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
