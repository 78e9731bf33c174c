"""Eight answers and two revisions of each, on a model that mlx-lm loaded."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_lm import convert, load

from weft.compat.n8loom import Loom  # in place of: from n8loom import Loom
from weft.samples import word_problem
from weft.search import answer_number


def answers(folder: str, max_tokens: int = 400) -> tuple[list[str], list[str]]:
    """Return the first answers and the revised ones."""
    model, tokenizer = load(folder)[:2]
    root = Loom(model, tokenizer, word_problem)
    start = root.add_text_child("I will solve this problem step by step.\n")
    start.ramify(n=8, temp=1.8, max_tokens=max_tokens, min_p=0.0, seed=1)
    doubt = "\n...Wait. I need to look at the problem again."
    first = start.apply_at_leaves(lambda leaf: leaf.crown())
    return first, start.apply_at_leaves(
        lambda leaf: leaf.ramify(doubt) if leaf.terminal else leaf,
        lambda leaf: leaf.ramify(n=2, temp=0.6, max_tokens=max_tokens, min_p=0.05, seed=2),
        lambda leaf: leaf.crown(),
    )


def converted(home: Path, *, four_bit: bool) -> str:
    folder = str(home / "model")
    tiny = str(files("weft") / "data" / "tiny")
    with redirect_stdout(sys.stderr):
        convert(tiny, folder, dtype="float32", quantize=four_bit, q_bits=4, q_group_size=64)
    return folder


def main(model: str | None = None, *, four_bit: bool = False, max_tokens: int = 400) -> None:
    with TemporaryDirectory() as home:
        folder = model or converted(Path(home), four_bit=four_bit)
        for name, texts in zip(("first", "revised"), answers(folder, max_tokens), strict=True):
            votes = Counter(answer_number(text) or "none" for text in texts)
            print(f"{len(texts):2} {name} answers:", dict(votes.most_common()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder that mlx_lm.load reads")
    parser.add_argument("--4bit", dest="four_bit", action="store_true", help="quantise tiny")
    main(**vars(parser.parse_args()))
