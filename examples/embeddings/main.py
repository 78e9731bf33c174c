"""Embeddings: texts as vectors, and the nearest ones to a question."""

from __future__ import annotations

import argparse

import weft
from weft import samples

TEXTS = {
    "sum": "What is 18 + 24?",
    "game24": "Use 2 3 8 9 to make 24.",
    "story": "Tell me a story about an owl.",
    "record": "Describe Max the bear as JSON.",
}
QUERIES = {
    "game24": samples.game24,
    "story": samples.story,
    "record": samples.record,
    "sum": samples.sum,
}


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    # Rows are normalised, so that a product of two is their cosine: float32 [N, D].
    texts = lm.embed(list(TEXTS.values()), pooling="mean")
    queries = lm.embed(list(QUERIES.values()), pooling="mean")
    right = 0
    for kind, row in zip(QUERIES, queries @ texts.T, strict=True):
        nearest = list(TEXTS)[int(row.argmax())]
        right += nearest == kind
        cosines = "  ".join(f"{name} {value:.2f}" for name, value in zip(TEXTS, row, strict=True))
        print(f"{kind:>7} → {nearest:<7} {cosines}")
    print(f"{right} of {len(QUERIES)} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
